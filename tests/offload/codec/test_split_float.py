"""High bytes, low bits and outliers together reconstruct the elements bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.codec.format import OUTLIER_BYTES, UNREAD_BLOCKS, SplitFormat, split_format
from offload.codec.outliers import Outliers
from offload.codec.split_float import SplitFloatCodec

CPU = torch.device("cpu")
ALL = torch.arange(1 << 16).to(torch.int16)  # every pattern of 16 bits
DTYPES = [torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def codec_of(dtype: torch.dtype) -> SplitFloatCodec:
    split = split_format(dtype)
    assert split is not None
    return SplitFloatCodec(split)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """Return every pattern as key and, in another order, as value, of two heads (2, 2, T, D)."""
    keys = ALL.view(2, -1, 64)
    return torch.stack([keys, keys.flip(0, 1)]).view(dtype)


def roundtrip(
    codec: SplitFloatCodec, kv: Tensor, offsets: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Return kv split and reconstructed with outliers, and which elements were outliers."""
    high, low, is_outlier = codec.split(kv, offsets)
    assert high.dtype == low.dtype == torch.uint8
    assert high.shape == kv.shape
    assert len(low) == codec.format.low_planes
    out = torch.empty_like(kv)
    codec.reconstruct(high, low, offsets, out)
    outliers = Outliers(int(is_outlier.sum()), kv.shape[1], kv.device)
    outliers.append(kv, is_outlier, 0)
    outliers.apply(out, 0, 2)
    return out, is_outlier


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@every_dtype
def test_every_pattern_roundtrips_with_every_offset(dtype: torch.dtype) -> None:
    codec = codec_of(dtype)
    kv = every_pattern(dtype)
    exponents = range(256 - 16) if dtype == torch.bfloat16 else [0]
    for exponent in exponents:
        offsets = [[exponent << 7, 0], [0, exponent << 7]]
        out, _ = roundtrip(codec, kv, offsets)
        assert torch.equal(bits(out), bits(kv)), exponent


@every_dtype
def test_high_bytes_are_the_nearest_float8(dtype: torch.dtype) -> None:
    """High bytes alone are within half a float8 step, and decode as torch's float8 does."""
    codec = codec_of(dtype)
    kv = (torch.randn(2, 3, 500, 64) * torch.tensor([1.0, 3e-3, 900.0])[:, None, None]).to(dtype)
    offsets = codec.offsets(kv)
    high, _, is_outlier = codec.split(kv, offsets)
    decoded = torch.empty_like(kv)
    codec.reconstruct(high, None, offsets, decoded)
    in_range = ~is_outlier
    mantissa = 3 if dtype == torch.bfloat16 else 2
    error = (decoded.float() - kv.float()).abs() / kv.float().abs()
    normal = in_range & (kv.abs() > torch.finfo(dtype).smallest_normal)
    assert error[normal].max() <= 2.0 ** -(mantissa + 1)
    if dtype == torch.bfloat16:
        scales = (torch.tensor(offsets) >> 7) - 120  # e4m3fn is biased by 7, bfloat16 by 127
        scale = torch.exp2(scales.float())[..., None, None]
        values = high.view(torch.float8_e4m3fn).float() * scale
    else:
        values = high.view(torch.float8_e5m2).float()
    assert torch.equal(values[in_range], decoded.float()[in_range])


@every_dtype
def test_high_bytes_of_any_pattern_are_finite(dtype: torch.dtype) -> None:
    codec = codec_of(dtype)
    kv = every_pattern(dtype)
    offsets = codec.offsets(kv)
    high, _, _ = codec.split(kv, offsets)
    decoded = torch.empty_like(kv)
    codec.reconstruct(high, None, offsets, decoded)
    assert decoded.isfinite().all()
    float8 = torch.float8_e4m3fn if dtype == torch.bfloat16 else torch.float8_e5m2
    assert high.view(float8).float().isfinite().all()


def test_fourteen_octaves_below_the_largest_element_have_no_outliers() -> None:
    codec = codec_of(torch.bfloat16)
    octaves = torch.exp2(-torch.arange(20.0)) * 1.9921875  # the largest mantissa
    kv = octaves[:, None].expand(2, 1, 20, 8).to(torch.bfloat16)
    offsets = codec.offsets(kv)
    _, _, is_outlier = codec.split(kv, offsets)
    # the last octave in range is reached by rounding up
    assert is_outlier[0, 0, :, 0].tolist() == [False] * 15 + [True] * 5
    high, _, is_outlier = codec.split(4 * kv, offsets)  # later tokens may exceed the offsets' range
    assert is_outlier[0, 0, :2, 0].all()
    assert not is_outlier[0, 0, 2:15].any()
    assert (high[0, 0, :2] == codec.format.max_high).all()


def test_only_16_bit_dtypes_can_be_split() -> None:
    assert split_format(torch.float32) is None
    assert isinstance(split_format(torch.float16), SplitFormat)


@every_dtype
def test_overwriting_tokens_replaces_their_outliers(dtype: torch.dtype) -> None:
    kv = torch.randn(2, 3, 40, 8).to(dtype)
    mask = torch.rand(kv.shape) < 0.2
    outliers = Outliers(kv.numel(), 3, kv.device)
    outliers.append(kv, mask, 0)
    new_kv = torch.randn(2, 3, 7, 8).to(dtype)
    new_mask = torch.rand(2, 3, 7, 8) < 0.2
    outliers.append(new_kv, new_mask, 20)
    kv[:, :, 20:27], mask[:, :, 20:27] = new_kv, new_mask
    for head, heads in [(0, 3), (1, 1), (1, 2)]:
        out = torch.zeros(2, heads, 40, 8, dtype=dtype)
        outliers.apply(out, head, heads)
        expected = torch.where(mask, kv, 0)[:, head : head + heads]
        assert torch.equal(bits(out), bits(expected))


def test_outliers_are_appended_in_any_number_of_pieces() -> None:
    """Some tokens are overwritten while their outliers are still pending."""
    kv = torch.randn(2, 3, 200, 8).bfloat16()
    mask = torch.rand(kv.shape) < 0.1
    outliers = Outliers(5, 3, kv.device)
    for start in [*range(0, 60, 2), *range(40, 200, 2)]:
        part = slice(start, start + 2)
        outliers.append(kv[:, :, part], mask[:, :, part], start)
    for end in (200, 77):
        outliers.truncate(end, 8)
        out = torch.zeros(2, 3, 200, 8).bfloat16()
        outliers.apply(out, 0, 3)
        assert torch.equal(out[:, :, :end], torch.where(mask, kv, 0)[:, :, :end])
        assert not out[:, :, end:].any()
    copy = torch.zeros(2, 2, 200, 8).bfloat16()
    outliers.to_host().apply(copy, 1, 2)
    assert torch.equal(copy, out[:, 1:])


def test_blocks_are_read_later() -> None:
    """How many outliers they have is not waited for; sorting reads the rest."""
    counted, answered = [], []

    def read_later(x: Tensor) -> Callable[[], Tensor]:
        counted.append(x)
        return lambda: answered.append(x) or x

    outliers = Outliers(500, 2, CPU, read_later)
    kv = torch.randn(2, 2, 70, 8).bfloat16()
    mask = torch.rand(kv.shape) < 0.2
    expected = torch.where(mask, kv, 0)
    for start in range(0, 70, 10):
        part = slice(start, start + 10)
        outliers.append(kv[:, :, part], mask[:, :, part], start)
    assert (len(counted), len(answered)) == (7, 7 - UNREAD_BLOCKS)
    outliers.sort()
    assert len(answered) == 7
    kv.zero_()  # from now on it may change
    out = torch.zeros(2, 2, 70, 8).bfloat16()
    outliers.apply(out, 0, 2)
    assert torch.equal(out, expected)


def test_lists_are_sorted_while_later_blocks_are_not_read() -> None:
    """Many blocks are pending before the last ones are counted."""
    answered = []
    outliers = Outliers(500, 2, CPU, lambda x: lambda: answered.append(x) or x)
    kv = torch.randn(2, 2, 320, 8).bfloat16()
    mask = torch.rand(kv.shape) < 0.2
    for count, start in enumerate(range(0, 320, 4), 1):
        part = slice(start, start + 4)
        outliers.append(kv[:, :, part], mask[:, :, part], start)
        assert len(answered) == max(0, count - UNREAD_BLOCKS)
    outliers.sort()
    for values in outliers._lists():
        assert (values.positions.diff() > 0).all()
    out = torch.zeros_like(kv)
    outliers.apply(out, 0, 2)
    assert torch.equal(out, torch.where(mask, kv, 0))


@every_dtype
def test_memory_grows_beyond_the_planned_outliers(dtype: torch.dtype) -> None:
    kv = torch.randn(2, 2, 60, 8).to(dtype)
    outliers = Outliers(5, 2, kv.device)
    assert outliers.nbytes == 5 * OUTLIER_BYTES
    mask = torch.ones(2, 2, 20, 8, dtype=torch.bool)
    for start in range(0, 60, 20):
        outliers.append(kv[:, :, start : start + 20], mask, start)
    out = torch.zeros_like(kv)
    outliers.apply(out, 0, 2)
    assert torch.equal(bits(out), bits(kv))
    assert outliers.nbytes >= kv.numel() * OUTLIER_BYTES


def test_lists_that_grow_in_a_forward_are_written_outside_of_one() -> None:
    """A cache is restored outside of forwards."""
    kv, some = torch.randn(2, 2, 8, 4).bfloat16(), torch.ones(2, 2, 8, 4, dtype=torch.bool)
    outliers = Outliers(1, 2, kv.device)
    with torch.inference_mode():
        outliers.append(kv, some, 0)
        outliers.sort()
    outliers.append(kv, some, 4)
    out = torch.zeros(2, 2, 12, 4, dtype=torch.bfloat16)
    outliers.apply(out, 0, 2)
    assert torch.equal(out, torch.cat([kv[:, :, :4], kv], dim=2))
