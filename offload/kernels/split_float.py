"""Fused GPU kernels for split floats: splitting, reconstruction, and attention over high bytes.

With plain operations, each bit operation would go through device memory once more, and attention
over high bytes would write them in 16 bits first. Each operation is also a launch, and a forward
has thousands. Importing this needs triton, which comes with CUDA builds of torch.

Source of the attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1), with the keys
split over programs, as in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.attention.folding import Partial
from offload.codec.format import SplitFormat
from offload.layout import ceil_div

_BLOCK = 1024  # elements of a head per program, where there is no attention
_KEYS = 64  # keys per tile, of which larger heads have half
_WIDE = 256  # columns of a head up to which tiles are of full size
_PROGRAMS = 512  # target number of programs: four for each multiprocessor of a 4090
_MIN_KEYS = 256  # minimum keys per program
_FEW_ROWS = 16  # smallest block of rows
_STAGED_DIM, _STAGED = 128, 32 * 128  # largest head and largest block with prefetched tiles
# triton's interpreter, which tests use, would multiply bfloat16 as integers
UPCAST = os.environ.get("TRITON_INTERPRET") == "1"


def split(fmt: SplitFormat, kv: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return high bytes, low bits, and which elements are outliers, as `SplitFloatCodec.split`.

    Args:
        fmt: the elements' split format.
        kv: (2, H, T, D), in a 16-bit dtype; the tokens of a head are contiguous.
        offsets: (2, H) int32, on the device.
    """
    _, heads, tokens, dim = kv.shape
    count = tokens * dim
    high = torch.empty(kv.shape, dtype=torch.uint8, device=kv.device)
    low = torch.empty(fmt.low_planes, *kv.shape[1:], dtype=torch.uint8, device=kv.device)
    outliers = torch.empty(kv.shape, dtype=torch.bool, device=kv.device)
    _split[ceil_div(count, _BLOCK), heads](
        kv.view(torch.int16),
        offsets,
        high,
        low,
        outliers.view(torch.uint8),
        count,
        kv.stride(0),
        kv.stride(1),
        offsets.stride(0),
        LOW_BITS=fmt.low_bits,
        MIN_HIGH=fmt.min_high,
        MAX_HIGH=fmt.max_high,
        SHARED=fmt.low_planes == 1,
        BLOCK=_BLOCK,
    )
    return high, low, outliers


def write_outliers(
    positions: Tensor, patterns: Tensor, starts: Tensor, longest: int, out: Tensor, head: int
) -> None:
    """Write the outliers of the heads from `head` on to out, as `Outliers.apply` does.

    Args:
        positions: (n,) int32, in lists: of the keys of each head, then of the values.
        patterns: (n,) int16.
        starts: (2 * H + 1,) int32, the first element of each list, and the end of the last.
        longest: length of the longest list.
        out: (2, h, capacity, D), in a 16-bit dtype; the tokens of a head are contiguous.
        head: the first head.
    """
    _write_outliers[ceil_div(longest, _BLOCK) or 1, 2, out.shape[1]](
        positions,
        patterns,
        starts,
        out.view(torch.int16),
        head,
        len(starts) // 2,
        out.stride(0),
        out.stride(1),
        BLOCK=_BLOCK,
    )


def reconstruct(fmt: SplitFormat, high: Tensor, low: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Write the elements of high bytes and low bits to out, as `SplitFloatCodec.reconstruct` does.

    In all tensors the tokens of a head are contiguous.

    Args:
        fmt: the elements' split format.
        high: (2, H, T, D) uint8.
        low: (P, H, T, D) uint8.
        offsets: (2, H) int32, on the device.
        out: (2, H, T, D), in a 16-bit dtype.
    """
    _, heads, tokens, dim = out.shape
    count = tokens * dim
    _reconstruct[ceil_div(count, _BLOCK), heads](
        high,
        low,
        offsets,
        out.view(torch.int16),
        count,
        high.stride(0),
        high.stride(1),
        low.stride(0),
        low.stride(1),
        offsets.stride(0),
        out.stride(0),
        out.stride(1),
        LOW_BITS=fmt.low_bits,
        SHARED=fmt.low_planes == 1,
        BLOCK=_BLOCK,
    )


def attend(fmt: SplitFormat, q: Tensor, high: Tensor, offsets: Tensor, recent: Partial) -> Partial:
    """Return the attention of q over the values of high bytes, merged with that over other keys.

    Every row sees all keys of the high bytes.

    Args:
        fmt: the elements' split format.
        q: (T, Hq, D), in the dtype that was split, Hq a multiple of H.
        high: (2, H, N, D) uint8, N >= 1; the tokens of a head are contiguous.
        offsets: (2, H) int32, on the device.
        recent: attention of q over other keys.
    """
    rows, query_heads, dim = q.shape
    _, heads, tokens, _ = high.shape
    groups = query_heads // heads
    folded = rows * groups  # rows of a KV head
    columns = max(16, triton.next_power_of_2(dim))
    max_rows, keys = tile_sizes(columns)
    block = min(max_rows, max(_FEW_ROWS, triton.next_power_of_2(folded)))
    blocks = ceil_div(folded, block)
    target = max(1, _PROGRAMS // (heads * blocks))
    max_splits = ceil_div(tokens, _MIN_KEYS)
    splits = min(target, max_splits)
    split_keys = ceil_div(tokens, splits)
    split_keys = ceil_div(split_keys, keys) * keys
    splits = ceil_div(tokens, split_keys)
    outs = torch.empty(splits, rows, query_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(splits, rows, query_heads, dtype=torch.float32, device=q.device)
    _attend[heads, blocks, splits](
        q.contiguous(),
        high,
        offsets,
        outs,
        lses,
        tokens,
        split_keys,
        folded,
        query_heads,
        dim,
        dim**-0.5,
        high.stride(0),
        high.stride(1),
        offsets.stride(0),
        GROUPS=groups,
        LOW_BITS=fmt.low_bits,
        ROWS=block,
        KEYS=keys,
        DIM=columns,
        UPCAST=UPCAST,
        **launch_options(block, columns),
    )
    return _merged(outs, lses, recent)


def _merged(outs: Tensor, lses: Tensor, recent: Partial) -> Partial:
    """Merge attention over splits of the keys, (S, T, Hq, D) and (S, T, Hq), and over others."""
    splits, rows, query_heads, dim = outs.shape
    recent_out, recent_lse = recent
    out = torch.empty(rows, query_heads, dim, dtype=recent_out.dtype, device=outs.device)
    lse = torch.empty(rows, query_heads, dtype=torch.float32, device=outs.device)
    _merge[rows, query_heads](
        outs,
        lses,
        recent_out,
        recent_lse,
        out,
        lse,
        splits,
        dim,
        *recent_out.stride()[:2],
        *recent_lse.stride(),
        DIM=triton.next_power_of_2(dim),
    )
    return out, lse


def tile_sizes(columns: int) -> tuple[int, int]:
    """Return the most rows of a program, and the keys of a tile, for heads of this size."""
    return (64, _KEYS) if columns <= _WIDE else (16, _KEYS // 2)


def launch_options(rows: int, columns: int) -> dict[str, int]:
    """Return the number of key tiles in flight, and of warps, for a program of this size.

    Shared memory is 100 KB on an RTX 3090 or 4090: enough for two programs at a time up to head
    dimension 128, and for one above. Few rows are fastest like this on an H200 (docs/log.md).
    """
    if rows * columns > _STAGED or columns > _STAGED_DIM:
        return {"num_stages": 1, "num_warps": 4}
    return {"num_stages": 2, "num_warps": 2 if rows == _FEW_ROWS else 4}


@triton.jit
def _patterns(high_byte, low_bits, constant, LOW_BITS: tl.constexpr):
    """Return the int16 patterns of elements: y, of high byte and low bits, plus a constant."""
    MASK: tl.constexpr = (0x7F << LOW_BITS) - (1 << 15)  # bits of the high byte in y
    y = high_byte.to(tl.int8, bitcast=True).to(tl.int32) << LOW_BITS
    y = (y & MASK) | low_bits
    return (y + constant).to(tl.int16)


# Specialising on argument values would compile another kernel in the middle of a request.
@triton.jit(do_not_specialize=["offset_part"])
def _split(
    kv,
    offsets,
    high,
    low,
    outliers,
    count,
    kv_part,
    kv_head,
    offset_part,
    LOW_BITS: tl.constexpr,
    MIN_HIGH: tl.constexpr,
    MAX_HIGH: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split a block of elements of one head, keys and values."""
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < count
    half: tl.constexpr = 1 << (LOW_BITS - 1)
    both = tl.zeros((BLOCK,), tl.int32)
    for part in tl.static_range(2):
        pattern = tl.load(kv + part * kv_part + head * kv_head + element, mask=mask, other=0)
        pattern = pattern.to(tl.int32)
        y = (pattern & 0x7FFF) + half - tl.load(offsets + part * offset_part + head)
        upper = y >> LOW_BITS
        is_outlier = (upper < MIN_HIGH) | (upper > MAX_HIGH)
        upper = tl.minimum(tl.maximum(upper, 0), MAX_HIGH) | ((pattern >> 8) & 0x80)
        low_bits = y & ((1 << LOW_BITS) - 1)
        target = (part * heads + head) * count + element
        tl.store(high + target, upper.to(tl.uint8), mask=mask)
        tl.store(outliers + target, is_outlier.to(tl.uint8), mask=mask)
        if SHARED:
            both |= low_bits << (4 * part)
        else:
            tl.store(low + target, low_bits.to(tl.uint8), mask=mask)
    if SHARED:
        tl.store(low + head * count + element, both.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["head", "heads"])
def _write_outliers(
    positions, patterns, starts, out, head, heads, out_part, out_head, BLOCK: tl.constexpr
):
    """Write a block of the outliers of one head's keys or values."""
    part = tl.program_id(1)
    index = tl.program_id(2)
    entry = part * heads + head + index
    element = tl.load(starts + entry) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < tl.load(starts + entry + 1)
    position = tl.load(positions + element, mask=mask, other=0)
    pattern = tl.load(patterns + element, mask=mask, other=0)
    base = part.to(tl.int64) * out_part + index.to(tl.int64) * out_head
    tl.store(out + base + position, pattern, mask=mask)


@triton.jit(do_not_specialize=["offset_part"])
def _reconstruct(
    high,
    low,
    offsets,
    out,
    count,
    high_part,
    high_head,
    low_part,
    low_head,
    offset_part,
    out_part,
    out_head,
    LOW_BITS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reconstruct a block of elements of one head, keys and values."""
    head = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < count
    half: tl.constexpr = 1 << (LOW_BITS - 1)
    for part in tl.static_range(2):
        pointers = high + part * high_part + head * high_head + element
        high_byte = tl.load(pointers, mask=mask, other=0)
        if SHARED:  # bfloat16: four bits of the key and, above them, four of the value
            pointers = low + head * low_head + element
            both = tl.load(pointers, mask=mask, other=0)
            low_bits = both.to(tl.int32)
            low_bits = (low_bits >> (4 * part)) & 0xF
        else:
            pointers = low + part * low_part + head * low_head + element
            low_bits = tl.load(pointers, mask=mask, other=0)
            low_bits = low_bits.to(tl.int32)
        offset = tl.load(offsets + part * offset_part + head)
        patterns = _patterns(high_byte, low_bits, offset - half, LOW_BITS)
        pointers = out + part * out_part + head * out_head + element
        tl.store(pointers, patterns, mask=mask)


# Not specialised: these differ between forwards, or between the self-test and a model.
@triton.jit(do_not_specialize=["tokens", "split_keys", "rows", "query_heads", "offset_part"])
def _attend(
    q,
    high,
    offsets,
    outs,
    lses,
    tokens,
    split_keys,
    rows,
    query_heads,
    dim,
    scale,
    high_part,
    high_head,
    offset_part,
    GROUPS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with a block of one KV head's rows to one split of its keys."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    first = tl.program_id(1) * ROWS
    row = first + tl.arange(0, ROWS)
    row_mask = row < rows
    # rows are the query heads of a KV head, token after token
    query = row // GROUPS
    member = row % GROUPS
    q_row = query * query_heads + head * GROUPS + member  # index into (T * Hq)
    column = tl.arange(0, DIM)
    column_mask = column < dim
    dtype = q.dtype.element_ty
    dot_dtype = tl.float32 if UPCAST else dtype
    q_mask = row_mask[:, None] & column_mask[None, :]
    q_element = q_row[:, None] * dim + column[None, :]
    queries = tl.load(q + q_element, mask=q_mask, other=0.0)
    queries = queries.to(dot_dtype)
    key_offset = tl.load(offsets + head)
    value_offset = tl.load(offsets + offset_part + head)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, DIM), tl.float32)
    begin = split * split_keys
    end = tl.minimum(begin + split_keys, tokens)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        token_mask = token < end
        pointers = high + head * high_head + token[None, :] * dim + column[:, None]
        mask = token_mask[None, :] & column_mask[:, None]
        high_bytes = tl.load(pointers, mask=mask, other=0)  # (DIM, KEYS)
        keys = _patterns(high_bytes, 0, key_offset, LOW_BITS)
        keys = keys.to(dtype, bitcast=True)
        keys = keys.to(dot_dtype)
        scores = tl.dot(queries, keys) * scale
        scores = tl.where(token_mask[None, :], scores, float("-inf"))
        new_peak = tl.max(scores, 1)
        new_peak = tl.maximum(peak, new_peak)
        weights = tl.exp(scores - new_peak[:, None])
        rescale = tl.exp(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        pointers = high + high_part + head * high_head + token[:, None] * dim + column[None, :]
        mask = token_mask[:, None] & column_mask[None, :]
        high_bytes = tl.load(pointers, mask=mask, other=0)  # (KEYS, DIM)
        values = _patterns(high_bytes, 0, value_offset, LOW_BITS)
        values = values.to(dtype, bitcast=True)
        values = values.to(dot_dtype)
        weights = weights.to(dtype)
        weights = weights.to(dot_dtype)
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights, values)
        peak = new_peak
    base = split * (rows // GROUPS) * query_heads  # index of the split's first result
    out = weighted / total[:, None]
    lse = peak + tl.log(total)
    tl.store(outs + base * dim + q_element, out, mask=q_mask)
    tl.store(lses + base + q_row, lse, mask=row_mask)


@triton.jit(
    do_not_specialize=[
        "splits",
        "recent_row",
        "recent_head",
        "recent_lse_row",
        "recent_lse_head",
    ]
)
def _merge(
    outs,
    lses,
    recent_out,
    recent_lse,
    merged,
    lse,
    splits,
    dim,
    recent_row,
    recent_head,
    recent_lse_row,
    recent_lse_head,
    DIM: tl.constexpr,
):
    """Merge the parts of one row and query head, by the online softmax."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.num_programs(0)
    heads = tl.num_programs(1)
    column = tl.arange(0, DIM)
    mask = column < dim
    pointers = recent_out + row * recent_row + head * recent_head + column
    weighted = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    peak = tl.load(recent_lse + row * recent_lse_row + head * recent_lse_head)
    total = tl.full((), 1.0, tl.float32)
    for split in range(splits):
        entry = (split * rows + row) * heads + head
        part_lse = tl.load(lses + entry)
        part = tl.load(outs + entry.to(tl.int64) * dim + column, mask=mask, other=0.0)
        new_peak = tl.maximum(peak, part_lse)
        weight = tl.exp(part_lse - new_peak)
        rescale = tl.exp(peak - new_peak)
        weighted = weighted * rescale + part * weight
        total = total * rescale + weight
        peak = new_peak
    entry = row * heads + head
    out = (weighted / total).to(merged.dtype.element_ty)
    tl.store(merged + entry * dim + column, out, mask=mask)
    tl.store(lse + entry, peak + tl.log(total))
