"""Fused GPU kernel for attention over the high bytes of split floats.

Selected keys are exact: their low bits are read, too. Plain operations would write the values in 16
bits first. Importing this needs triton, which comes with CUDA builds of torch.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1), with the keys split over
programs, as in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.merge_kernel import merge_parts
from offload.codec.format import SplitFormat
from offload.codec.selected_keys import SelectedKeys
from offload.kernels.tiles import FEW_ROWS, UPCAST, bit_patterns, launch_options, tile_sizes
from offload.layout import ceil_div

_PROGRAMS = 512  # target number of programs: four for each multiprocessor of a 4090
_MIN_KEYS = 256  # minimum keys per program


def attend(
    fmt: SplitFormat,
    q: Tensor,
    high: Tensor,
    offsets: Tensor,
    recent: Partial,
    selected: SelectedKeys | None = None,
) -> Partial:
    """Return the attention of q over the values of high bytes, merged with that over other keys.

    Every row sees all keys of the high bytes.

    Args:
        fmt: the elements' split format.
        q: (T, Hq, D), in the dtype that was split, Hq a multiple of H.
        high: (2, H, N, D) uint8, N >= 1; the tokens of a head are contiguous.
        offsets: (2, H) int32, on the device.
        recent: attention of q over other keys.
        selected: low bits of some of these heads' keys, on the device. Those of a head are
            contiguous, as are its places, and start a whole number of keys after the beginning of
            allocated memory. Tokens beyond the last place are not selected.
    """
    rows, query_heads, dim = q.shape
    _, heads, tokens, _ = high.shape
    groups = query_heads // heads
    folded = rows * groups  # rows of a KV head
    columns = max(16, triton.next_power_of_2(dim))
    max_rows, keys = tile_sizes(columns)
    block = min(max_rows, max(FEW_ROWS, triton.next_power_of_2(folded)))
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
        *_selected_arguments(selected),
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
        LOW_BYTES=fmt.low_key_bytes(dim),
        ROWS=block,
        KEYS=keys,
        DIM=columns,
        UPCAST=UPCAST,
        **launch_options(block, columns, has_low_bits=selected is not None),
    )
    return merge_parts(outs, lses, recent)


def _selected_arguments(selected: SelectedKeys | None) -> tuple[Any, ...]:
    """Return the arguments of the kernel from `lows` to `chunk`."""
    if selected is None:
        return (None,) * 6
    lows, places = selected.lows, selected.places
    tokens = lows.stride(0) // lows.shape[2]  # from the start of a head to that of the next
    return lows, places, tokens, places.stride(0), places.shape[1], selected.chunk


# Not specialised: these differ between forwards, or between the self-test and a model.
@triton.jit(
    do_not_specialize=[
        "lows",
        "places",
        "low_tokens",
        "places_head",
        "place_count",
        "chunk",
        "tokens",
        "split_keys",
        "rows",
        "query_heads",
        "offset_part",
    ]
)
def _attend(
    q,
    high,
    offsets,
    lows,
    places,
    low_tokens,
    places_head,
    place_count,
    chunk,
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
    LOW_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with a block of one KV head's rows to one split of its keys.

    Without selected keys, `lows` and their other arguments are None.
    """
    HALF: tl.constexpr = 1 << (LOW_BITS - 1)  # low bits of keys that are not selected
    ROUNDED: tl.constexpr = 0x88 if LOW_BITS == 4 else HALF  # a byte of these
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
        if lows is None:
            keys = bit_patterns(high_bytes, 0, key_offset, LOW_BITS)
        else:
            chunk_index = token // chunk
            pointers = places + head * places_head + chunk_index
            place = tl.load(pointers, mask=token_mask & (chunk_index < place_count), other=-1)
            entry = head * low_tokens + place * chunk + token % chunk
            pointers = lows + entry[None, :] * LOW_BYTES + (column % LOW_BYTES)[:, None]
            # keys start at multiples of their size: several bytes are loaded at a time
            pointers = tl.multiple_of(pointers, (LOW_BYTES & -LOW_BYTES, 1))
            mask = (place >= 0)[None, :] & column_mask[:, None]
            low_bits = tl.load(pointers, mask=mask, other=ROUNDED)  # (DIM, KEYS)
            low_bits = low_bits.to(tl.int32)
            if LOW_BITS == 4:  # two dimensions share a byte, the second in the upper bits
                shift = tl.where(column < LOW_BYTES, 0, 4)
                low_bits = (low_bits >> shift[:, None]) & 0xF
            keys = bit_patterns(high_bytes, low_bits, key_offset - HALF, LOW_BITS)
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
        values = bit_patterns(high_bytes, 0, value_offset, LOW_BITS)
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
