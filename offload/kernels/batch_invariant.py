"""Fused kernels for attention in blocks at fixed positions on a GPU (`batch_invariant_attention`).

Block by block and head by head, plain operations are some eight launches for each of the tens of
thousands of blocks of a long text. Here all of a layer's are two. What makes a row's numbers its
own is the same: a program has one block of rows, one block of keys and one head, in tiles of one
shape, and another puts a row's blocks together in their order. Keys that a row does not see add
zeros. Importing this needs triton, which comes with torch where that is built for CUDA.

Source of the attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.kernels.split_float import WIDENS
from offload.layout import ceil_div

_TILE = 64  # keys that a program looks at at a time
_MAX_ROWS = 64  # of a program: more would not fit a processor's registers
_MAX_ROWS_OF_LARGE_HEADS = 16  # in 32 bits: with more, shared memory of 100 KB does not do


def attend(q: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the causal attention (T, Hq, D) of the last T of N tokens, q (T, Hq, D).

    parts: keys and values (2, Hkv, n, D) of all N tokens, in one part or two, one behind the other.
    A head's tokens lie one behind the other in each.
    """
    rows, query_heads, dim = q.shape
    prefix = parts[0]
    recent = parts[-1]
    end = sum(part.shape[2] for part in parts)
    start = end - rows
    heads = prefix.shape[1]
    groups = query_heads // heads
    spans = ceil_div(end, KEY_BLOCK)
    outs = torch.empty(spans, rows, query_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(spans, rows, query_heads, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, query_heads, dim, dtype=q.dtype, device=q.device)
    columns = max(16, triton.next_power_of_2(dim))
    tile = program_rows(groups, columns, q.dtype)
    tiles = ceil_div(ROW_BLOCK * groups, tile)
    last_block = ceil_div(end, ROW_BLOCK)
    blocks = last_block - start // ROW_BLOCK
    strides = []  # in tokens
    for part in (prefix, recent):
        strides.append(part.stride(0) // dim)
        strides.append(part.stride(1) // dim)
    _attend[heads, blocks * tiles, spans](
        q.contiguous(),
        prefix,
        recent,
        outs,
        lses,
        start,
        rows,
        prefix.shape[2],
        end,
        query_heads,
        dim**-0.5,
        *strides,
        GROUPS=groups,
        WIDTH=ROW_BLOCK,
        SPAN=KEY_BLOCK,
        ROWS=tile,
        TILES=tiles,
        TILE=_TILE,
        DIM=dim,
        COLUMNS=columns,
        WIDENS=WIDENS,
        num_stages=1,  # tiles loaded ahead in 32 bits would not fit a processor's memory
    )
    _merge[rows, query_heads](outs, lses, out, spans, rows, query_heads, DIM=dim, COLUMNS=columns)
    return out


def program_rows(groups: int, columns: int, dtype: torch.dtype) -> int:
    """Return how many rows of a KV head a program has.

    Args:
        groups: query heads per KV head.
        columns: dimensions of a head, as many as a tile has.
        dtype: of the elements.
    """
    rows = triton.next_power_of_2(ROW_BLOCK * groups)
    rows = max(16, rows)
    most = _MAX_ROWS
    if columns > 128 and dtype.itemsize == 4:
        most = _MAX_ROWS_OF_LARGE_HEADS
    return min(most, rows)


@triton.jit
def _load(early, deferred, cell, token, at, boundary, mask, TILE: tl.constexpr):
    """Return what stands in a tile's cells, of tokens before the boundary or behind it."""
    begins_early = at < boundary
    ends_late = at + TILE > boundary
    if begins_early & ends_late:
        is_early = token < boundary
        is_late = token >= boundary
        loaded = tl.load(early + cell, mask=mask & is_early, other=0.0)
        rest = tl.load(deferred + cell, mask=mask & is_late, other=0.0)
        loaded = tl.where(is_early, loaded, rest)
    else:  # a tile in one piece, as nearly all are: its memory is read in whole lines
        place = tl.where(begins_early, early, deferred)
        loaded = tl.load(place + cell, mask=mask, other=0.0)
    return loaded


# One kernel for all passes: what is compiled for another kind of number might sum in another order.
@triton.jit(
    do_not_specialize=[
        "start",
        "rows",
        "boundary",
        "end",
        "query_heads",
        "prefix_part",
        "prefix_head",
        "recent_part",
        "recent_head",
    ]
)
def _attend(
    q,
    prefix,
    recent,
    outs,
    lses,
    start,
    rows,
    boundary,
    end,
    query_heads,
    scale,
    prefix_part,
    prefix_head,
    recent_part,
    recent_head,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Attend with a block of one KV head's rows to one block of its keys; strides are in tokens."""
    head = tl.program_id(0).to(tl.int64)
    span = tl.program_id(2)
    block = tl.program_id(1) // TILES
    tile = tl.program_id(1) % TILES
    first = start // WIDTH + block
    first = first * WIDTH
    # rows are the query heads of a KV head, token after token
    row = tile * ROWS + tl.arange(0, ROWS)
    position = first + row // GROUPS
    member = row % GROUPS
    query = position - start
    asked = (query >= 0) & (query < rows)
    here = asked & (row < WIDTH * GROUPS)
    query_head = head * GROUPS + member
    place = query * query_heads + query_head
    column = tl.arange(0, COLUMNS)
    there = column < DIM
    element = q.dtype.element_ty
    multiplied = tl.float32 if WIDENS else element
    own = here[:, None] & there[None, :]
    cells = place * DIM
    cells = cells[:, None] + column[None, :]
    queries = tl.load(q + cells, mask=own, other=0.0)
    queries = queries.to(multiplied)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = span * SPAN
    stop = tl.minimum(end, first + WIDTH)
    stop = tl.minimum(begin + SPAN, stop)
    # where token 0 of this head is, or would be
    early = head * prefix_head
    deferred = head * recent_head - boundary
    early_keys = prefix + early * DIM
    late_keys = recent + deferred * DIM
    early += prefix_part
    deferred += recent_part
    early_values = prefix + early * DIM
    late_values = recent + deferred * DIM
    for at in range(begin, stop, TILE):
        token = at + tl.arange(0, TILE)
        inside = token < end
        # (COLUMNS, TILE)
        first_cell = token * DIM
        cell = first_cell[None, :] + column[:, None]
        here_keys = inside[None, :] & there[:, None]
        keys = _load(early_keys, late_keys, cell, token[None, :], at, boundary, here_keys, TILE)
        keys = keys.to(multiplied)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        seen = token[None, :] <= position[:, None]
        seen = seen & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.max(scores, 1)
        highest = tl.maximum(peak, highest)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - shift[:, None])
        faded = tl.exp(peak - shift)
        total = total * faded + tl.sum(weights, 1)
        # (TILE, COLUMNS)
        cell = first_cell[:, None] + column[None, :]
        here_values = inside[:, None] & there[None, :]
        values = _load(
            early_values, late_values, cell, token[:, None], at, boundary, here_values, TILE
        )
        values = values.to(multiplied)
        weights = weights.to(element)
        weights = weights.to(multiplied)
        summed = summed * faded[:, None]
        summed += tl.dot(weights, values, input_precision="ieee")
        peak = highest
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    before = span.to(tl.int64) * rows  # of the blocks before
    before *= query_heads
    out = summed / divisor[:, None]
    tl.store(outs + before * DIM + cells, out, mask=own)
    lse = tl.where(empty, float("-inf"), peak + tl.log(divisor))
    tl.store(lses + before + place, lse, mask=here)


@triton.jit(do_not_specialize=["spans", "rows", "query_heads"])
def _merge(
    outs,
    lses,
    attended,
    spans,
    rows,
    query_heads,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Put together what each block of keys says to a row of one query head, in their order."""
    place = tl.program_id(0).to(tl.int64) * query_heads
    place += tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    there = column < DIM
    peak = float("-inf")
    total = 0.0
    summed = tl.zeros((COLUMNS,), tl.float32)
    for span in range(spans):
        before = span * rows
        cell = place + before * query_heads
        lse = tl.load(lses + cell)
        out = tl.load(outs + cell * DIM + column, mask=there, other=0.0)
        highest = tl.maximum(peak, lse)  # the first block has a key that the row sees
        weight = tl.exp(lse - highest)
        faded = tl.exp(peak - highest)
        total = total * faded + weight
        summed = summed * faded + weight * out
        peak = highest
    merged = summed / total
    merged = merged.to(attended.dtype.element_ty)
    tl.store(attended + place * DIM + column, merged, mask=there)
