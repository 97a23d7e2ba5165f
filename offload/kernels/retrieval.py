"""Fused GPU kernels for selected tokens: scores of chunks, tokens in 8 bits, and low bits of keys.

Heads that are streamed arrive one by one, and plain operations would take dozens of launches for
each: more time than its transfer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.codec.format import SplitFormat
from offload.codec.int8 import LARGEST, scale_limits
from offload.kernels.tiles import UPCAST
from offload.layout import ceil_div

_KEYS = 64  # keys per tile, and the largest chunk
_SPLIT_KEYS = 2048  # keys per program that sums weights
_SCORED_KEYS = 512  # keys per program that scores
_QUERIES = 8  # largest number of query tokens
_ROWS = 64  # largest number of rows: query tokens times query heads per KV head
_TOKENS = 16  # tokens per program that quantises


def supports(query_tokens: int, groups: int, chunk: int) -> bool:
    """Return whether `chunk_scores` computes these shapes."""
    is_power_of_2 = chunk & (chunk - 1) == 0
    return (
        query_tokens <= _QUERIES
        and _QUERIES * triton.next_power_of_2(groups) <= _ROWS
        and is_power_of_2
        and chunk <= _KEYS
    )


def chunk_scores(
    q: Tensor,
    keys: Tensor,
    recent: Tensor,
    count: int,
    chunk: int,
    previous: Tensor | None = None,
    decay: float = 0.0,
) -> Tensor:
    """Return the score (H, C) float32 of each of the C chunks of `chunk` keys of the prefix.

    It is the attention that the chunk gets: the maximum over query tokens for each key, averaged
    over query heads; plus `decay` times its previous score. See `offload.retrieval.selection`.

    Args:
        q: (T, Hq, D) in 16 bits, rotated; `count` of them are sampled, evenly spaced.
        keys: (H, N, D), the prefix, N a multiple of the chunk; the tokens of a head are contiguous.
        recent: (H, M, D), M >= T, the keys after it; the last T are those of the queries.
        count: number of query tokens, at most T and 8.
        chunk: keys per chunk, a power of 2 of at most 64.
        previous: (H, c) float32, the scores of the first c chunks at another time; those of a head
            are contiguous.
        decay: see above.
    """
    rows, query_heads, dim = q.shape
    heads, tokens, _ = keys.shape
    groups = query_heads // heads
    members = max(triton.next_power_of_2(groups), 16 // _QUERIES)
    splits = ceil_div(tokens, _SPLIT_KEYS)
    # the last part is that of the recent keys
    lses = torch.empty(splits + 1, heads, _QUERIES * members, dtype=torch.float32, device=q.device)
    scores = torch.empty(heads, tokens // chunk, dtype=torch.float32, device=q.device)
    sizes = {
        "GROUPS": groups,
        "MEMBERS": members,
        "QUERIES": _QUERIES,
        "KEYS": _KEYS,
        "DIM": max(16, triton.next_power_of_2(dim)),
        "UPCAST": UPCAST,
    }
    queries = (q, rows, count, dim, dim**-0.5, q.stride(0), q.stride(1))
    for part, segment in ((lses, keys), (lses[splits], recent)):
        is_recent = segment is recent
        split_keys = recent.shape[1] if is_recent else _SPLIT_KEYS
        _sum_weights[heads, 1 if is_recent else splits](
            *queries,
            segment,
            part,
            segment.shape[1],
            split_keys,
            segment.stride(0),
            CAUSAL=is_recent,
            **sizes,
        )
    _score[heads, ceil_div(tokens, _SCORED_KEYS)](
        *queries,
        keys,
        lses,
        scores,
        tokens,
        splits + 1,
        keys.stride(0),
        previous,
        0 if previous is None else previous.shape[1],
        0 if previous is None else previous.stride(0),
        decay,
        CHUNK=chunk,
        TILES=_SCORED_KEYS // _KEYS,
        **sizes,
    )
    return scores


def store_int8(prefix: Tensor, chunks: Tensor, chunk: int, codes: Tensor, scales: Tensor) -> None:
    """Quantise chunks of the prefix as `offload.codec.int8.quantise` does.

    Args:
        prefix: (2, h, N, D) in 16 bits; the tokens of a head are contiguous.
        chunks: (h, n), the indices of the chunks.
        chunk: tokens per chunk.
        codes: (2, h, n * chunk, D) int8, written; the tokens of a head are contiguous.
        scales: (2, h, n * chunk, 1) in the prefix's dtype, likewise.
    """
    _, heads, tokens, dim = codes.shape
    smallest, largest = scale_limits(prefix.dtype)
    _store_int8[ceil_div(tokens, _TOKENS), 2, heads](
        prefix,
        chunks,
        codes,
        scales,
        tokens,
        chunk,
        dim,
        prefix.stride(0),
        prefix.stride(1),
        chunks.stride(0),
        chunks.stride(1),
        codes.stride(0),
        codes.stride(1),
        scales.stride(0),
        scales.stride(1),
        LARGEST=LARGEST,
        SMALLEST_SCALE=smallest,
        LARGEST_SCALE=largest,
        TOKENS=_TOKENS,
        DIM=triton.next_power_of_2(dim),
    )


def store_lows(fmt: SplitFormat, keys: Tensor, chunks: Tensor, chunk: int, lows: Tensor) -> None:
    """Store the low bits of chunks of keys, as `offload.codec.selected_keys.pack` does.

    Args:
        fmt: the elements' split format.
        keys: (h, N, D), in the dtype that was split; the tokens of a head are contiguous.
        chunks: (h, n), the indices of the chunks.
        chunk: tokens per chunk.
        lows: (h, n * chunk, D * low_bits / 8) uint8, written; likewise.
    """
    heads, tokens, width = lows.shape
    _store_lows[ceil_div(tokens, _TOKENS), heads](
        keys.view(torch.int16),
        chunks,
        lows,
        tokens,
        chunk,
        keys.shape[2],
        width,
        keys.stride(0),
        chunks.stride(0),
        chunks.stride(1),
        lows.stride(0),
        LOW_BITS=fmt.low_bits,
        TOKENS=_TOKENS,
        DIM=triton.next_power_of_2(width),
    )


@triton.jit
def _sampled_queries(
    q,
    head,
    rows,
    count,
    dim,
    q_row,
    q_head,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the queries (MEMBERS * QUERIES, DIM) of a KV head, which are valid, their tokens."""
    row = tl.arange(0, MEMBERS * QUERIES)
    member = row // QUERIES
    sample = row % QUERIES
    valid = (member < GROUPS) & (sample < count)
    token = tl.where(valid, (sample + 1) * rows // count - 1, 0)
    column = tl.arange(0, DIM)
    pointers = q + token[:, None] * q_row + (head * GROUPS + member[:, None]) * q_head
    mask = valid[:, None] & (column < dim)[None, :]
    queries = tl.load(pointers + column[None, :], mask=mask, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    return queries, valid, token


@triton.jit
def _products(queries, keys, start, end, dim, scale, KEYS: tl.constexpr, DIM: tl.constexpr):
    """Return scores (rows, KEYS) of the keys from `start` on, and which are before `end`."""
    token = start + tl.arange(0, KEYS)
    column = tl.arange(0, DIM)
    pointers = keys + token[None, :] * dim + column[:, None]
    mask = (token < end)[None, :] & (column < dim)[:, None]
    tile = tl.load(pointers, mask=mask, other=0.0).to(queries.dtype)
    return tl.dot(queries, tile) * scale, token


@triton.jit
def _raise_peak(peak, total, candidate):
    """Return the higher peak, what to subtract for it, and the total of weights rescaled to it."""
    new_peak = tl.maximum(peak, candidate)
    offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, offset, total * tl.exp(peak - offset)


_INTEGERS = ["rows", "count", "tokens", "split_keys", "splits", "q_row", "q_head"]
_PREVIOUS = ["previous", "previous_chunks", "previous_head", "decay"]


# Specialising on argument values would compile another kernel in the middle of a request.
@triton.jit(do_not_specialize=_INTEGERS)
def _sum_weights(
    q,
    rows,
    count,
    dim,
    scale,
    q_row,
    q_head,
    keys,
    lses,
    tokens,
    split_keys,
    key_head,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Write the log-sum-exp of the scores of one split of a head's keys."""
    ROWS: tl.constexpr = MEMBERS * QUERIES
    head = tl.program_id(0)
    split = tl.program_id(1)
    heads = tl.num_programs(0)
    queries, _, query = _sampled_queries(
        q, head, rows, count, dim, q_row, q_head, GROUPS, MEMBERS, QUERIES, DIM, UPCAST
    )
    begin = split * split_keys
    end = tl.minimum(begin + split_keys, tokens)
    base = keys + head.to(tl.int64) * key_head
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, end, KEYS):
        scores, token = _products(queries, base, start, end, dim, scale, KEYS, DIM)
        visible = (token < end)[None, :]
        if CAUSAL:
            visible = visible & (token[None, :] <= query[:, None] + (tokens - rows))
        scores = tl.where(visible, scores, float("-inf"))
        peak, offset, total = _raise_peak(peak, total, tl.max(scores, 1))
        total += tl.sum(tl.exp(scores - offset[:, None]), 1)
    row = tl.arange(0, ROWS)
    tl.store(lses + (split * heads + head) * ROWS + row, peak + tl.log(total))


@triton.jit(do_not_specialize=_INTEGERS + _PREVIOUS)
def _score(
    q,
    rows,
    count,
    dim,
    scale,
    q_row,
    q_head,
    keys,
    lses,
    results,
    tokens,
    splits,
    key_head,
    previous,
    previous_chunks,
    previous_head,
    decay,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write the scores of the chunks in a few tiles of a head's keys."""
    ROWS: tl.constexpr = MEMBERS * QUERIES
    PER_TILE: tl.constexpr = KEYS // CHUNK
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    queries, valid, _ = _sampled_queries(
        q, head, rows, count, dim, q_row, q_head, GROUPS, MEMBERS, QUERIES, DIM, UPCAST
    )
    row = tl.arange(0, ROWS)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(splits):
        part = tl.load(lses + (split * heads + head) * ROWS + row)
        peak, offset, total = _raise_peak(peak, total, part)
        total += tl.exp(part - offset)
    lse = peak + tl.log(total)
    base = keys + head.to(tl.int64) * key_head
    chunks = tokens // CHUNK
    for tile in range(TILES):
        start = (tl.program_id(1) * TILES + tile) * KEYS
        scores, token = _products(queries, base, start, tokens, dim, scale, KEYS, DIM)
        weights = tl.exp(scores - lse[:, None])
        weights = tl.where(valid[:, None] & (token < tokens)[None, :], weights, 0.0)
        highest = tl.max(tl.reshape(weights, (MEMBERS, QUERIES, KEYS)), 1)
        mean = tl.sum(highest, 0) / GROUPS
        sums = tl.sum(tl.reshape(mean, (PER_TILE, CHUNK)), 1)
        chunk = start // CHUNK + tl.arange(0, PER_TILE)
        if previous is not None:
            pointers = previous + head * previous_head + chunk
            sums += decay * tl.load(pointers, mask=chunk < previous_chunks, other=0.0)
        tl.store(results + head * chunks + chunk, sums, mask=chunk < chunks)


@triton.jit
def _selected_tokens(chunks, place_stride, chunk, tokens, TOKENS: tl.constexpr):
    """Return this program's slots (TOKENS,), which are valid, and the tokens selected for them.

    `chunks` points to the indices of one head's chunks.
    """
    slot = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = slot < tokens
    index = tl.load(chunks + slot // chunk * place_stride, mask=mask, other=0)
    return slot, mask, index.to(tl.int32) * chunk + slot % chunk


@triton.jit(
    do_not_specialize=[
        "tokens",
        "chunk",
        "chunks_head",
        "chunks_place",
        "scales_part",
        "scales_head",
    ]
)
def _store_int8(
    prefix,
    chunks,
    codes,
    scales,
    tokens,
    chunk,
    dim,
    prefix_part,
    prefix_head,
    chunks_head,
    chunks_place,
    codes_part,
    codes_head,
    scales_part,
    scales_head,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Quantise a few selected tokens of one head's keys or values."""
    part = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    slot, mask, token = _selected_tokens(
        chunks + head * chunks_head, chunks_place, chunk, tokens, TOKENS
    )
    column = tl.arange(0, DIM)
    both = mask[:, None] & (column < dim)[None, :]
    pointers = prefix + part * prefix_part + head * prefix_head
    pointers = pointers + token[:, None] * dim + column[None, :]
    x = tl.load(pointers, mask=both, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 1) / LARGEST
    scale = tl.minimum(tl.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE)
    stored = scale.to(scales.dtype.element_ty)
    steps = x * (1 / stored.to(tl.float32))[:, None]
    steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to nearest, halves to even
    steps = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
    pointers = codes + part * codes_part + head * codes_head
    pointers = pointers + slot[:, None] * dim + column[None, :]
    tl.store(pointers, steps.to(tl.int8), mask=both)
    tl.store(scales + part * scales_part + head * scales_head + slot, stored, mask=mask)


@triton.jit(
    do_not_specialize=["tokens", "chunk", "width", "chunks_head", "chunks_place", "low_head"]
)
def _store_lows(
    keys,
    chunks,
    lows,
    tokens,
    chunk,
    dim,
    width,
    key_head,
    chunks_head,
    chunks_place,
    low_head,
    LOW_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Store the low bits of a few selected keys of one head."""
    HALF: tl.constexpr = 1 << (LOW_BITS - 1)
    MASK: tl.constexpr = (1 << LOW_BITS) - 1
    head = tl.program_id(1).to(tl.int64)
    slot, mask, token = _selected_tokens(
        chunks + head * chunks_head, chunks_place, chunk, tokens, TOKENS
    )
    column = tl.arange(0, DIM)
    both = mask[:, None] & (column < width)[None, :]
    pointers = keys + head * key_head + token[:, None] * dim + column[None, :]
    packed = (tl.load(pointers, mask=both, other=0).to(tl.int32) + HALF) & MASK
    if LOW_BITS == 4:  # the other half of the dimensions is in the upper bits
        second = (tl.load(pointers + width, mask=both, other=0).to(tl.int32) + HALF) & MASK
        packed = packed | (second << 4)
    pointers = lows + head * low_head + slot[:, None] * width + column[None, :]
    tl.store(pointers, packed.to(tl.uint8), mask=both)
