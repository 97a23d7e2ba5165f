"""Fused GPU kernels for split floats: splitting, reconstruction, and attention over high bytes.

With plain operations, each bit operation would go through device memory once more. Each is also a
launch, and a forward has thousands. Importing this needs triton, which comes with CUDA builds of
torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.codec.format import SplitFormat
from offload.kernels.split_attention import attend
from offload.kernels.tiles import bit_patterns
from offload.layout import ceil_div

__all__ = ["attend", "reconstruct", "split", "write_outliers"]  # all that a split layer calls

_BLOCK = 1024  # elements of a head per program


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
        patterns = bit_patterns(high_byte, low_bits, offset - half, LOW_BITS)
        pointers = out + part * out_part + head * out_head + element
        tl.store(pointers, patterns, mask=mask)
