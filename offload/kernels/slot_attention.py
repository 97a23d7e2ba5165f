"""Fused GPU kernels for short forwards on caches with a slot per token, of several sequences.

Their tokens are rotated, written and attended to in three launches a layer, for all sequences
together. Selected tokens in 8 bits are read as they are stored: plain operations write them in 16
bits first, which takes longer than the rest of a 7B's forward (docs/log.md).

Source of the attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1), with the keys
split over programs, as in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.attention.folding import Partial
from offload.kernels.tiles import UPCAST, launch_options, tile_sizes
from offload.layout import ceil_div

# keys per program: with 32 KV heads a budget of 4,096 makes four for each of a 4090's processors
_SPLIT_KEYS = 256
_NO_WINDOW = 1 << 30  # more slots than any buffer has
_MAX_SPLITS = 64  # programs that share the keys of a head
_COLUMNS: tl.constexpr = tl.constexpr(6)  # numbers in a row of a table


@dataclass(frozen=True)
class SlotTable:
    """Where some layers' buffers of several sequences are, whose addresses must not change.

    `rows` (L, B, 6) int64 has, for each layer and sequence, the addresses of codes, scales, KV and
    keys before rotation, zero if there are none, and the number of slots in 8 bits, and in KV.
    """

    rows: Tensor
    heads: int
    dim: int
    codes: int  # largest number of slots in 8 bits
    tokens: int  # largest number of slots in KV, with that for padding

    @classmethod
    def of(cls, layers: Iterable[Iterable[Sequence[Tensor | None]]]) -> SlotTable:
        """Return the table of `layers`, each with the buffers of every sequence.

        They are those of `offload.cache.static_shape.SlotBuffers`.
        """
        rows: list[list[list[int]]] = []
        for layer in layers:
            rows.append([])
            for kv, raw, codes, scales in layer:
                buffers = (codes, scales, kv, raw)
                assert kv is not None
                assert all(each is None or each.is_contiguous() for each in buffers)
                assert raw is None or raw.shape == kv.shape[1:]
                addresses = [0 if each is None else each.data_ptr() for each in buffers]
                slots = 0 if codes is None else codes.shape[2]
                rows[-1].append([*addresses, slots, kv.shape[2]])
                device, heads, dim = kv.device, kv.shape[1], kv.shape[3]
        table = torch.tensor(rows)
        *_, codes_slots, tokens = table.flatten(0, 1).amax(0).tolist()
        return cls(table.to(device), heads, dim, codes_slots, tokens)


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    table: SlotTable,
    layer: int,
    places: Tensor,
) -> Tensor:
    """Write the tokens' KV to a layer's buffers, and return q rotated (B * T, Hq, D).

    Args:
        q: (B * T, Hq, D), the T tokens of each of B sequences.
        k: (B * T, H, D), before rotation.
        v: (B * T, H, D).
        angles: cos and sin (B * T, 1, R) as of `Rotary`, contiguous; None to rotate nothing.
        table: the buffers.
        layer: index in the table.
        places: (B, 3) int64, each sequence's number of tokens, slot of the first one, and first
            valid slot. Tokens beyond that number are padding.
    """
    rows, query_heads, dim = q.shape
    out = torch.empty(rows, query_heads, dim, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if angles is None else angles
    _write[rows, table.heads + query_heads](
        q,
        k,
        v,
        cos,
        sin,
        out,
        table.rows[layer],
        places,
        rows // len(places),
        table.heads,
        dim,
        0 if angles is None else cos.shape[-1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        DIM=triton.next_power_of_2(dim),
    )
    return out


def attend(
    q: Tensor, table: SlotTable, layer: int, places: Tensor, window: int | None = None
) -> Partial:
    """Return the attention of q (B * T, Hq, D), from `write`, over a layer's slots.

    Each token sees the slots from its sequence's first valid one to its own, the last `window` of
    them if that is not None. The other arguments are those of `write`. Padding sees none.
    """
    rows, query_heads, dim = q.shape
    sequences, heads = len(places), table.heads
    tokens = rows // sequences
    groups = query_heads // heads
    columns = max(16, triton.next_power_of_2(dim))
    max_rows, keys = tile_sizes(columns)
    block = min(max_rows, max(16, triton.next_power_of_2(tokens * groups)))
    blocks = ceil_div(tokens * groups, block)
    # The same for any number of sequences and tokens: with caches of the same size, a sequence
    # gets the same results as alone.
    split_keys = _SPLIT_KEYS
    while ceil_div(table.codes, split_keys) + ceil_div(table.tokens, split_keys) > _MAX_SPLITS:
        split_keys *= 2
    code_splits = ceil_div(table.codes, split_keys)
    splits = code_splits + ceil_div(table.tokens, split_keys)
    outs = torch.empty(splits, rows, query_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(splits, rows, query_heads, dtype=torch.float32, device=q.device)
    _attend[sequences * heads, blocks, splits](
        q,
        table.rows[layer],
        places,
        outs,
        lses,
        tokens,
        heads,
        query_heads,
        dim,
        dim**-0.5,
        code_splits,
        split_keys,
        _NO_WINDOW if window is None else window,
        GROUPS=groups,
        ROWS=block,
        KEYS=keys,
        DIM=columns,
        CODES=table.codes > 0,
        UPCAST=UPCAST,
        **launch_options(block, columns),
    )
    out = torch.empty(rows, query_heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, query_heads, dtype=torch.float32, device=q.device)
    _merge[rows, query_heads](
        outs, lses, out, lse, splits, dim, SPLITS=_MAX_SPLITS, DIM=triton.next_power_of_2(dim)
    )
    return out, lse


@triton.jit(
    do_not_specialize=[
        "tokens",
        "heads",
        "rotated",
        "q_row",
        "q_head",
        "k_row",
        "k_head",
        "v_row",
        "v_head",
    ]
)
def _write(
    q,
    k,
    v,
    cos,
    sin,
    turned,
    table,
    places,
    tokens,
    heads,
    dim,
    rotated,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    DIM: tl.constexpr,
):
    """Rotate one head of a token's queries, or rotate and write one of its keys and values."""
    row = tl.program_id(0)
    sequence = row // tokens
    head = tl.program_id(1)
    column = tl.arange(0, DIM)
    mask = column < dim
    half = rotated // 2
    partner = tl.where(column < half, column + half, column - half)
    turns = column < rotated
    if head < heads:
        source = k + row * k_row + head * k_head
    else:
        source = q + row * q_row + (head - heads) * q_head
    dtype = q.dtype.element_ty
    stored = tl.load(source + column, mask=mask, other=0.0)
    x = stored.to(tl.float32)
    other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    cosines = tl.load(cos + row * rotated + column, mask=turns, other=0.0).to(tl.float32)
    sines = tl.load(sin + row * rotated + column, mask=turns, other=0.0).to(tl.float32)
    product = (x * cosines).to(dtype).to(tl.float32)  # rounded, as by plain operations
    x = tl.where(turns, product + other * sines, x).to(dtype)
    if head >= heads:
        query_heads = tl.num_programs(1) - heads
        tl.store(turned + (row * query_heads + head - heads) * dim + column, x, mask=mask)
    else:
        entry = table + sequence * _COLUMNS
        slots = tl.load(entry + 5)
        step = row % tokens
        first = tl.load(places + sequence * 3 + 1) - tl.load(entry + 4)
        index = tl.where(step < tl.load(places + sequence * 3), first + step, slots - 1)
        kv = tl.load(entry + 2).to(tl.pointer_type(dtype))
        target = (head * slots + index) * dim + column
        tl.store(kv + target, x, mask=mask)
        values = tl.load(v + row * v_row + head * v_head + column, mask=mask, other=0.0)
        tl.store(kv + heads * slots * dim + target, values, mask=mask)
        raw = tl.load(entry + 3)
        if raw != 0:
            tl.store(raw.to(tl.pointer_type(dtype)) + target, stored, mask=mask)


@triton.jit
def _attend_segment(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    begin,
    end,
    first,
    last,
    window,
    scale,
    dim,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CODES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return attention (ROWS, DIM) and log-sum-exp of tokens from `begin` to `end` of a buffer.

    A row sees those from `first` to its own of `last`, of which only the last `window`.
    """
    column = tl.arange(0, DIM)
    in_head = column < dim
    dot_dtype = queries.dtype
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        in_range = token < end
        mask = in_range[None, :] & in_head[:, None]
        tile = tl.load(keys + token[None, :] * dim + column[:, None], mask=mask, other=0)
        if CODES:
            scales = tl.load(key_scales + token, mask=in_range, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) * scales[None, :]).to(dtype)
        scores = tl.dot(queries, tile.to(dot_dtype)) * scale
        visible = (token >= first)[None, :] & (token[None, :] <= last[:, None])
        visible = visible & (token[None, :] > last[:, None] - window)
        scores = tl.where(visible & in_range[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that sees no key yet
        weights = tl.exp(scores - offset[:, None])
        rescale = tl.exp(peak - offset)
        total = total * rescale + tl.sum(weights, 1)
        mask = in_range[:, None] & in_head[None, :]
        tile = tl.load(values + token[:, None] * dim + column[None, :], mask=mask, other=0)
        if CODES:
            scales = tl.load(value_scales + token, mask=in_range, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) * scales[:, None]).to(dtype)
        weights = weights.to(dtype).to(dot_dtype)
        weighted = weighted * rescale[:, None] + tl.dot(weights, tile.to(dot_dtype))
        peak = new_peak
    out = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    return out, peak + tl.log(total)


# Not specialised: these differ between forwards, or between the self-test and a model.
@triton.jit(
    do_not_specialize=["tokens", "heads", "query_heads", "code_splits", "split_keys", "window"]
)
def _attend(
    q,
    table,
    places,
    outs,
    lses,
    tokens,
    heads,
    query_heads,
    dim,
    scale,
    code_splits,
    split_keys,
    window,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CODES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with a block of one KV head's rows of a sequence to one split of its slots."""
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    split = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # rows are the query heads of a KV head, token after token
    step = row // GROUPS
    q_row = (sequence * tokens + step) * query_heads + head * GROUPS + row % GROUPS
    row_mask = row < tokens * GROUPS
    column = tl.arange(0, DIM)
    q_mask = row_mask[:, None] & (column < dim)[None, :]
    q_element = q_row[:, None] * dim + column[None, :]
    dtype: tl.constexpr = q.dtype.element_ty
    queries = tl.load(q + q_element, mask=q_mask, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    entry = table + sequence * _COLUMNS
    code_slots = tl.load(entry + 4)
    slots = tl.load(entry + 5)
    count = tl.load(places + sequence * 3)
    slot = tl.load(places + sequence * 3 + 1)
    first = tl.maximum(tl.load(places + sequence * 3 + 2), slot - window + 1)
    end = tl.where(count > 0, slot + count, 0)  # end of the slots that any row sees
    last = tl.where(step < count, slot + step, -1)
    out = tl.zeros((ROWS, DIM), tl.float32)
    lse = tl.full((ROWS,), float("-inf"), tl.float32)
    if split < code_splits:
        if CODES:
            codes = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int8)), [16])
            scales = tl.load(entry + 1).to(tl.pointer_type(dtype))
            begin = tl.maximum(split * split_keys, first // KEYS * KEYS)
            stop = tl.minimum(tl.minimum((split + 1) * split_keys, code_slots), end)
            part = heads * code_slots
            out, lse = _attend_segment(
                queries,
                codes + head * code_slots * dim,
                codes + (part + head * code_slots) * dim,
                scales + head * code_slots,
                scales + part + head * code_slots,
                begin.to(tl.int32),
                stop.to(tl.int32),
                first.to(tl.int32),
                last.to(tl.int32),
                window,
                scale,
                dim,
                ROWS,
                KEYS,
                DIM,
                True,
                dtype,
            )
    else:
        kv = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(dtype)), [16])
        first = tl.maximum(first - code_slots, 0)
        begin = tl.maximum((split - code_splits) * split_keys, first // KEYS * KEYS)
        stop = (split - code_splits + 1) * split_keys
        stop = tl.minimum(tl.minimum(stop, slots - 1), end - code_slots)
        out, lse = _attend_segment(
            queries,
            kv + head * slots * dim,
            kv + (heads + head) * slots * dim,
            kv,
            kv,
            begin.to(tl.int32),
            stop.to(tl.int32),
            first.to(tl.int32),
            (last - code_slots).to(tl.int32),
            window,
            scale,
            dim,
            ROWS,
            KEYS,
            DIM,
            False,
            dtype,
        )
    base = (split * (tl.num_programs(0) // heads) * tokens).to(tl.int64) * query_heads
    tl.store(outs + base * dim + q_element, out, mask=q_mask)
    tl.store(lses + base + q_row, lse, mask=row_mask)


@triton.jit(do_not_specialize=["splits"])
def _merge(outs, lses, merged, totals, splits, dim, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """Merge the splits of one row and query head, by the online softmax."""
    entry = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    entries = tl.num_programs(0) * tl.num_programs(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    exists = split < splits
    lse = tl.load(lses + split * entries + entry, mask=exists, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    total = tl.where(total == 0.0, 1.0, total)  # zero for padding
    pointers = outs + (split * entries + entry)[:, None] * dim + column[None, :]
    mask = exists[:, None] & (column < dim)[None, :]
    parts = tl.load(pointers, mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / total
    tl.store(merged + entry * dim + column, out.to(merged.dtype.element_ty), mask=column < dim)
    tl.store(totals + entry, peak + tl.log(total))
