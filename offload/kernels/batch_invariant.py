"""Fused GPU kernels for attention in blocks at fixed positions (`batch_invariant_attention`).

Plain operations need about eight launches for each block and head, and a long document has tens of
thousands of blocks; the fused kernels need two launches per layer. They are batch-invariant for the
same reason: a program has one block of rows, one block of keys and one head, in tiles of one shape,
and a second kernel merges a row's blocks in order. Keys that a row does not see add zeros.
Importing this needs triton, which comes with CUDA builds of torch.

Source of the attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.attention.folding import Partial
from offload.kernels.batch_invariant_shape import KEY_BLOCK, ROW_BLOCK
from offload.kernels.tiles import UPCAST
from offload.layout import ceil_div

_TILE = 64  # keys per tile
_MAX_ROWS = 64  # rows per program: more would not fit a multiprocessor's registers
_MAX_ROWS_OF_LARGE_HEADS = 16  # above 512 bytes more would not fit 100 KB of shared memory


def attend(q: Tensor, parts: Sequence[Tensor]) -> Partial:
    """Return the causal attention of the last T of N tokens, q (T, Hq, D).

    parts: keys and values (2, Hkv, n, D) of all N tokens, in order, in one part or two. In each,
    the tokens of a head are contiguous.
    """
    rows, query_heads, dim = q.shape
    prefix = parts[0]
    recent = parts[-1]
    end = sum(part.shape[2] for part in parts)
    start = end - rows
    heads = prefix.shape[1]
    groups = query_heads // heads
    key_blocks = ceil_div(end, KEY_BLOCK)
    outs = torch.empty(key_blocks, rows, query_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(key_blocks, rows, query_heads, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, query_heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, query_heads, dtype=torch.float32, device=q.device)
    columns = max(16, triton.next_power_of_2(dim))
    tile = program_rows(groups, columns, q.dtype)
    tiles = ceil_div(ROW_BLOCK * groups, tile)
    last_block = ceil_div(end, ROW_BLOCK)
    blocks = last_block - start // ROW_BLOCK
    strides = []  # in tokens
    for part in (prefix, recent):
        strides.append(part.stride(0) // dim)
        strides.append(part.stride(1) // dim)
    _attend[heads, blocks * tiles, key_blocks](
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
        ROW_BLOCK=ROW_BLOCK,
        KEY_BLOCK=KEY_BLOCK,
        ROWS=tile,
        TILES=tiles,
        TILE=tile_keys(columns),
        DIM=dim,
        COLUMNS=columns,
        UPCAST=UPCAST,
        num_stages=1,  # prefetched 32-bit tiles would not fit shared memory
    )
    _merge[rows, query_heads](
        outs, lses, out, lse, key_blocks, rows, query_heads, DIM=dim, COLUMNS=columns
    )
    return out, lse


def tile_keys(columns: int) -> int:
    """Return the keys of a tile, for a head dimension padded to `columns`."""
    return _TILE if columns <= 256 else _TILE // 2


def program_rows(groups: int, columns: int, dtype: torch.dtype) -> int:
    """Return the rows of a KV head per program.

    Args:
        groups: query heads per KV head.
        columns: head dimension, padded to the size of a tile.
        dtype: of the elements.
    """
    rows = triton.next_power_of_2(ROW_BLOCK * groups)
    rows = max(16, rows)
    limit = _MAX_ROWS
    if columns * dtype.itemsize > 512:
        limit = _MAX_ROWS_OF_LARGE_HEADS
    return min(limit, rows)


@triton.jit
def _load(prefix, recent, element, token, first, boundary, mask, TILE: tl.constexpr):
    """Load a tile of elements; tokens from `boundary` on are in `recent`, the others in `prefix`.

    `first` is the tile's first token.
    """
    begins_in_prefix = first < boundary
    ends_in_recent = first + TILE > boundary
    if begins_in_prefix & ends_in_recent:
        in_prefix = token < boundary
        in_recent = token >= boundary
        loaded = tl.load(prefix + element, mask=mask & in_prefix, other=0.0)
        rest = tl.load(recent + element, mask=mask & in_recent, other=0.0)
        loaded = tl.where(in_prefix, loaded, rest)
    else:  # a tile within one part, as nearly all are: loads are coalesced
        base = tl.where(begins_in_prefix, prefix, recent)
        loaded = tl.load(base + element, mask=mask, other=0.0)
    return loaded


# One kernel for all forwards: specialised on other argument values, it might sum in another order.
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
    ROW_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with a block of one KV head's rows to one block of its keys; strides are in tokens."""
    head = tl.program_id(0).to(tl.int64)
    key_block = tl.program_id(2)
    block = tl.program_id(1) // TILES
    tile = tl.program_id(1) % TILES
    first = start // ROW_BLOCK + block
    first = first * ROW_BLOCK
    # rows are the query heads of a KV head, token after token
    row = tile * ROWS + tl.arange(0, ROWS)
    position = first + row // GROUPS
    member = row % GROUPS
    query = position - start
    is_query = (query >= 0) & (query < rows)
    row_mask = is_query & (row < ROW_BLOCK * GROUPS)
    query_head = head * GROUPS + member
    q_row = query * query_heads + query_head  # index into (T * Hq)
    column = tl.arange(0, COLUMNS)
    column_mask = column < DIM
    dtype = q.dtype.element_ty
    dot_dtype = tl.float32 if UPCAST else dtype
    q_mask = row_mask[:, None] & column_mask[None, :]
    q_element = q_row * DIM
    q_element = q_element[:, None] + column[None, :]
    queries = tl.load(q + q_element, mask=q_mask, other=0.0)
    queries = queries.to(dot_dtype)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = key_block * KEY_BLOCK
    stop = tl.minimum(end, first + ROW_BLOCK)
    stop = tl.minimum(begin + KEY_BLOCK, stop)
    # this head's token 0 in each part, real or virtual
    prefix_base = head * prefix_head
    recent_base = head * recent_head - boundary
    prefix_keys = prefix + prefix_base * DIM
    recent_keys = recent + recent_base * DIM
    prefix_base += prefix_part
    recent_base += recent_part
    prefix_values = prefix + prefix_base * DIM
    recent_values = recent + recent_base * DIM
    for tile_start in range(begin, stop, TILE):
        token = tile_start + tl.arange(0, TILE)
        token_mask = token < end
        # (COLUMNS, TILE)
        token_element = token * DIM
        element = token_element[None, :] + column[:, None]
        key_mask = token_mask[None, :] & column_mask[:, None]
        keys = _load(
            prefix_keys, recent_keys, element, token[None, :], tile_start, boundary, key_mask, TILE
        )
        keys = keys.to(dot_dtype)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        visible = token[None, :] <= position[:, None]
        visible = visible & token_mask[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.max(scores, 1)
        new_peak = tl.maximum(peak, new_peak)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(peak - shift)
        total = total * rescale + tl.sum(weights, 1)
        # (TILE, COLUMNS)
        element = token_element[:, None] + column[None, :]
        value_mask = token_mask[:, None] & column_mask[None, :]
        values = _load(
            prefix_values,
            recent_values,
            element,
            token[:, None],
            tile_start,
            boundary,
            value_mask,
            TILE,
        )
        values = values.to(dot_dtype)
        weights = weights.to(dtype)
        weights = weights.to(dot_dtype)
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights, values, input_precision="ieee")
        peak = new_peak
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    base = key_block.to(tl.int64) * rows  # index of the key block's first result
    base *= query_heads
    out = weighted / divisor[:, None]
    tl.store(outs + base * DIM + q_element, out, mask=q_mask)
    lse = tl.where(is_empty, float("-inf"), peak + tl.log(divisor))
    tl.store(lses + base + q_row, lse, mask=row_mask)


@triton.jit(do_not_specialize=["key_blocks", "rows", "query_heads"])
def _merge(
    outs,
    lses,
    attended,
    totals,
    key_blocks,
    rows,
    query_heads,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge the results of all key blocks for a row of one query head, in order."""
    q_row = tl.program_id(0).to(tl.int64) * query_heads
    q_row += tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    column_mask = column < DIM
    peak = float("-inf")
    total = 0.0
    weighted = tl.zeros((COLUMNS,), tl.float32)
    for key_block in range(key_blocks):
        first_row = key_block * rows
        index = q_row + first_row * query_heads
        lse = tl.load(lses + index)
        out = tl.load(outs + index * DIM + column, mask=column_mask, other=0.0)
        new_peak = tl.maximum(peak, lse)  # the first block has a key that the row sees
        weight = tl.exp(lse - new_peak)
        rescale = tl.exp(peak - new_peak)
        total = total * rescale + weight
        weighted = weighted * rescale + weight * out
        peak = new_peak
    merged = weighted / total
    merged = merged.to(attended.dtype.element_ty)
    tl.store(attended + q_row * DIM + column, merged, mask=column_mask)
    tl.store(totals + q_row, peak + tl.log(total))
