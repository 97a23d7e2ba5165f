"""Fused kernels for slices on a GPU: joining them, and attention to codes as they are.

Step by step, each operation on bits would be a pass over device memory of its own, and attention to
codes would write them in 16 bits first. Importing this needs triton, which comes with torch where
that is built for CUDA.

Source of the attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1), with the keys
split over programs, as in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.attention.folding import Partial, merge
from offload.codec.format import SplitFormat
from offload.layout import ceil_div

_RECONSTRUCTED = 1024  # elements of a head that a program joins
_KEYS = 64  # that a program looks at at a time
_PROGRAMS = 256  # over which keys are split: two for each processor of a 4090
_MIN_KEYS = 256  # of a program
_STAGED_DIM, _STAGED = 128, 32 * 128  # largest head, and largest block, with tiles loaded ahead
# triton's interpreter, which tests use, would multiply bfloat16 as whole numbers
WIDENS = os.environ.get("TRITON_INTERPRET") == "1"


def reconstruct(
    cut: SplitFormat, codes: Tensor, lows: Tensor, offsets: Tensor, out: Tensor
) -> None:
    """Write to out (2, H, T, D) the elements of slices, as `SplitFloatCodec.join` does.

    Args:
        cut: how elements are cut.
        codes: (2, H, T, D) uint8.
        lows: (P, H, T, D) uint8.
        offsets: (2, H) int32, on the device.
        out: of 16 bits. In all of these a head's tokens lie one behind the other.
    """
    _, heads, tokens, dim = out.shape
    count = tokens * dim
    _reconstruct[ceil_div(count, _RECONSTRUCTED), heads](
        codes,
        lows,
        offsets,
        out.view(torch.int16),
        count,
        codes.stride(0),
        codes.stride(1),
        lows.stride(0),
        lows.stride(1),
        offsets.stride(0),
        out.stride(0),
        out.stride(1),
        LOW_BITS=cut.low_bits,
        SHARED=cut.low_planes == 1,
        BLOCK=_RECONSTRUCTED,
    )


def attend(cut: SplitFormat, q: Tensor, codes: Tensor, offsets: Tensor) -> Partial:
    """Return the attention of q to what codes stand for; every row sees all of them.

    Args:
        cut: how elements were cut.
        q: (T, Hq, D), in the dtype that was cut, Hq a multiple of H.
        codes: (2, H, N, D) uint8, of at least one token; a head's lie one behind the other.
        offsets: (2, H) int32, on the device.
    """
    rows, query_heads, dim = q.shape
    _, heads, tokens, _ = codes.shape
    groups = query_heads // heads
    folded = rows * groups  # rows of a KV head
    block = triton.next_power_of_2(folded)
    block = min(64, max(16, block))
    blocks = ceil_div(folded, block)
    wanted = max(1, _PROGRAMS // (heads * blocks))
    most = ceil_div(tokens, _MIN_KEYS)
    splits = min(wanted, most)
    share = ceil_div(tokens, splits)
    share = ceil_div(share, _KEYS) * _KEYS  # keys of a split
    splits = ceil_div(tokens, share)
    columns = max(16, triton.next_power_of_2(dim))
    outs = torch.empty(splits, rows, query_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(splits, rows, query_heads, dtype=torch.float32, device=q.device)
    _attend[heads, blocks, splits](
        q.contiguous(),
        codes,
        offsets,
        outs,
        lses,
        tokens,
        share,
        folded,
        query_heads,
        dim,
        dim**-0.5,
        codes.stride(0),
        codes.stride(1),
        offsets.stride(0),
        GROUPS=groups,
        LOW_BITS=cut.low_bits,
        ROWS=block,
        KEYS=_KEYS,
        DIM=columns,
        WIDENS=WIDENS,
        num_stages=stages(block, columns),
    )
    parts = list(zip(outs, lses, strict=True))
    out, lse = merge(parts)
    out = out.to(q.dtype)
    return out, lse


def stages(rows: int, columns: int) -> int:
    """Return how many tiles of keys a program of so many rows and dimensions has in flight.

    Shared memory is 100 KB on an RTX 3090 or 4090, for two programs at a time up to head dimension
    128, and for one beyond.
    """
    is_small = rows * columns <= _STAGED
    if is_small and columns <= _STAGED_DIM:
        return 2
    return 1


@triton.jit
def _patterns(code, low, constant, LOW_BITS: tl.constexpr):
    """Return the patterns int16 of elements: y = code and low bits, less what split added."""
    KEPT: tl.constexpr = (0x7F << LOW_BITS) - (1 << 15)  # sign and code, where they were in y
    y = code.to(tl.int8, bitcast=True).to(tl.int32) << LOW_BITS
    y = (y & KEPT) | low
    return (y + constant).to(tl.int16)


# A kernel of its own for each kind of number would be compiled in the middle of a text.
@triton.jit(do_not_specialize=["offset_part"])
def _reconstruct(
    codes,
    lows,
    offsets,
    out,
    count,
    code_part,
    code_head,
    low_part,
    low_head,
    offset_part,
    out_part,
    out_head,
    LOW_BITS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join a block of elements of one head, keys and values."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    half: tl.constexpr = 1 << (LOW_BITS - 1)
    for part in tl.static_range(2):
        place = codes + part * code_part + head * code_head + at
        code = tl.load(place, mask=inside, other=0)
        if SHARED:  # of bfloat16: four bits of the key and, above them, four of the value
            place = lows + head * low_head + at
            both = tl.load(place, mask=inside, other=0)
            low = both.to(tl.int32)
            low = (low >> (4 * part)) & 0xF
        else:
            place = lows + part * low_part + head * low_head + at
            low = tl.load(place, mask=inside, other=0)
            low = low.to(tl.int32)
        offset = tl.load(offsets + part * offset_part + head)
        patterns = _patterns(code, low, offset - half, LOW_BITS)
        place = out + part * out_part + head * out_head + at
        tl.store(place, patterns, mask=inside)


# Likewise: these differ from pass to pass, or between the self-test and a model.
@triton.jit(do_not_specialize=["tokens", "share", "rows", "query_heads", "offset_part"])
def _attend(
    q,
    codes,
    offsets,
    outs,
    lses,
    tokens,
    share,
    rows,
    query_heads,
    dim,
    scale,
    code_part,
    code_head,
    offset_part,
    GROUPS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDENS: tl.constexpr,
):
    """Attend with a block of one KV head's rows to one split of its keys."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    first = tl.program_id(1) * ROWS
    row = first + tl.arange(0, ROWS)
    here = row < rows
    # rows are the query heads of a KV head, token after token
    query = row // GROUPS
    member = row % GROUPS
    place = query * query_heads + head * GROUPS + member
    column = tl.arange(0, DIM)
    there = column < dim
    element = q.dtype.element_ty
    multiplied = tl.float32 if WIDENS else element
    own = here[:, None] & there[None, :]
    cells = place[:, None] * dim + column[None, :]
    queries = tl.load(q + cells, mask=own, other=0.0)
    queries = queries.to(multiplied)
    key_offset = tl.load(offsets + head)
    value_offset = tl.load(offsets + offset_part + head)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, DIM), tl.float32)
    begin = split * share
    end = tl.minimum(begin + share, tokens)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        seen = token < end
        at = codes + head * code_head + token[None, :] * dim + column[:, None]
        mask = seen[None, :] & there[:, None]
        code = tl.load(at, mask=mask, other=0)  # (DIM, KEYS)
        keys = _patterns(code, 0, key_offset, LOW_BITS)
        keys = keys.to(element, bitcast=True)
        keys = keys.to(multiplied)
        scores = tl.dot(queries, keys) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.max(scores, 1)
        highest = tl.maximum(most, highest)
        weights = tl.exp(scores - highest[:, None])
        faded = tl.exp(most - highest)
        total = total * faded + tl.sum(weights, 1)
        at = codes + code_part + head * code_head + token[:, None] * dim + column[None, :]
        mask = seen[:, None] & there[None, :]
        code = tl.load(at, mask=mask, other=0)  # (KEYS, DIM)
        values = _patterns(code, 0, value_offset, LOW_BITS)
        values = values.to(element, bitcast=True)
        values = values.to(multiplied)
        weights = weights.to(element)
        weights = weights.to(multiplied)
        summed = summed * faded[:, None]
        summed += tl.dot(weights, values)
        most = highest
    before = split * (rows // GROUPS) * query_heads  # rows of the splits before
    out = summed / total[:, None]
    lse = most + tl.log(total)
    tl.store(outs + before * dim + cells, out, mask=own)
    tl.store(lses + before + place, lse, mask=here)
