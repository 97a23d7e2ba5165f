"""Slices and outliers together are the elements they were made of, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.codec.format import OUTLIER_BYTES, SplitFormat, split_format
from offload.codec.outliers import Outliers
from offload.codec.split_float import SplitFloatCodec

ALL = torch.arange(1 << 16).to(torch.int16)  # every pattern of 16 bits
DTYPES = [torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def codec_of(dtype: torch.dtype) -> SplitFloatCodec:
    found = split_format(dtype)
    assert found is not None
    return SplitFloatCodec(found)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """Every pattern as a key and, in another order, as a value, of two heads. (2, 2, T, D)"""
    keys = ALL.view(2, -1, 64)
    return torch.stack([keys, keys.flip(0, 1)]).view(dtype)


def came_back(
    codec: SplitFloatCodec, kv: Tensor, offsets: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """What split and join make of kv, outliers put in, and which elements were outliers."""
    codes, lows, chosen = codec.split(kv, offsets)
    assert codes.dtype == lows.dtype == torch.uint8
    assert codes.shape == kv.shape
    assert len(lows) == codec.format.low_planes
    out = torch.empty_like(kv)
    codec.reconstruct(codes, lows, offsets, out)
    outliers = Outliers(int(chosen.sum()), kv.shape[1], kv.device)
    outliers.append(kv, chosen, 0)
    outliers.apply(out, 0, 2)
    return out, chosen


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@every_dtype
def test_every_pattern_comes_back_with_every_offset(dtype: torch.dtype) -> None:
    codec, kv = codec_of(dtype), every_pattern(dtype)
    exponents = range(256 - 16) if dtype == torch.bfloat16 else [0]
    for exponent in exponents:
        offsets = [[exponent << 7, 0], [0, exponent << 7]]
        out, _ = came_back(codec, kv, offsets)
        assert torch.equal(bits(out), bits(kv)), exponent


@every_dtype
def test_a_code_is_the_nearest_float8(dtype: torch.dtype) -> None:
    """What codes alone say is within half of a step of float8, and is what torch reads in them."""
    codec = codec_of(dtype)
    kv = (torch.randn(2, 3, 500, 64) * torch.tensor([1.0, 3e-3, 900.0])[:, None, None]).to(dtype)
    offsets = codec.offsets(kv)
    codes, _, chosen = codec.split(kv, offsets)
    near = torch.empty_like(kv)
    codec.reconstruct(codes, None, offsets, near)
    ordinary = ~chosen
    mantissa = 3 if dtype == torch.bfloat16 else 2
    error = (near.float() - kv.float()).abs() / kv.float().abs()
    normal = ordinary & (kv.abs() > torch.finfo(dtype).smallest_normal)
    assert error[normal].max() <= 2.0 ** -(mantissa + 1)
    if dtype == torch.bfloat16:
        scales = (torch.tensor(offsets) >> 7) - 120  # e4m3fn is biased by 7, bfloat16 by 127
        scale = torch.exp2(scales.float())[..., None, None]
        values = codes.view(torch.float8_e4m3fn).float() * scale
    else:
        values = codes.view(torch.float8_e5m2).float()
    assert torch.equal(values[ordinary], near.float()[ordinary])


@every_dtype
def test_codes_are_finite_whatever_they_stand_for(dtype: torch.dtype) -> None:
    codec, kv = codec_of(dtype), every_pattern(dtype)
    offsets = codec.offsets(kv)
    codes, _, _ = codec.split(kv, offsets)
    near = torch.empty_like(kv)
    codec.reconstruct(codes, None, offsets, near)
    assert near.isfinite().all()
    float8 = torch.float8_e4m3fn if dtype == torch.bfloat16 else torch.float8_e5m2
    assert codes.view(float8).float().isfinite().all()


def test_fourteen_octaves_below_the_largest_element_need_no_list() -> None:
    codec = codec_of(torch.bfloat16)
    octaves = torch.exp2(-torch.arange(20.0)) * 1.9921875  # the largest mantissa there is
    kv = octaves[:, None].expand(2, 1, 20, 8).to(torch.bfloat16)
    offsets = codec.offsets(kv)
    _, _, chosen = codec.split(kv, offsets)
    assert chosen[0, 0, :, 0].tolist() == [False] * 15 + [True] * 5  # the last rounds up into range
    codes, _, chosen = codec.split(4 * kv, offsets)  # later tokens may exceed what was seen
    assert chosen[0, 0, :2, 0].all()
    assert not chosen[0, 0, 2:15].any()
    assert (codes[0, 0, :2] == codec.format.max_code).all()


def test_what_has_not_16_bits_has_no_slices() -> None:
    assert split_format(torch.float32) is None
    assert isinstance(split_format(torch.float16), SplitFormat)


@every_dtype
def test_outliers_of_tokens_written_again_are_forgotten(dtype: torch.dtype) -> None:
    kv = torch.randn(2, 3, 40, 8).to(dtype)
    chosen = torch.rand(kv.shape) < 0.2
    outliers = Outliers(kv.numel(), 3, kv.device)
    outliers.append(kv, chosen, 0)
    again, other = torch.randn(2, 3, 7, 8).to(dtype), torch.rand(2, 3, 7, 8) < 0.2
    outliers.append(again, other, 20)
    kv[:, :, 20:27], chosen[:, :, 20:27] = again, other
    for head, heads in [(0, 3), (1, 1), (1, 2)]:
        out = torch.zeros(2, heads, 40, 8, dtype=dtype)
        outliers.apply(out, head, heads)
        want = torch.where(chosen, kv, 0)[:, head : head + heads]
        assert torch.equal(bits(out), bits(want))


def test_outliers_come_in_any_number_of_pieces() -> None:
    """Some are written again while they are still apart."""
    kv = torch.randn(2, 3, 200, 8).bfloat16()
    chosen = torch.rand(kv.shape) < 0.1
    outliers = Outliers(5, 3, kv.device)
    for start in [*range(0, 60, 2), *range(40, 200, 2)]:
        part = slice(start, start + 2)
        outliers.append(kv[:, :, part], chosen[:, :, part], start)
    for end in (200, 77):
        outliers.truncate(end, 8)
        out = torch.zeros(2, 3, 200, 8).bfloat16()
        outliers.apply(out, 0, 3)
        assert torch.equal(out[:, :, :end], torch.where(chosen, kv, 0)[:, :, :end])
        assert not out[:, :, end:].any()
    copy = torch.zeros(2, 2, 200, 8).bfloat16()
    outliers.to_host().apply(copy, 1, 2)
    assert torch.equal(copy, out[:, 1:])


@every_dtype
def test_a_list_grows_where_there_are_more_than_planned(dtype: torch.dtype) -> None:
    kv = torch.randn(2, 2, 60, 8).to(dtype)
    outliers = Outliers(5, 2, kv.device)
    assert outliers.nbytes == 5 * OUTLIER_BYTES
    everything = torch.ones(2, 2, 20, 8, dtype=torch.bool)
    for start in range(0, 60, 20):
        outliers.append(kv[:, :, start : start + 20], everything, start)
    out = torch.zeros_like(kv)
    outliers.apply(out, 0, 2)
    assert torch.equal(bits(out), bits(kv))
    assert outliers.nbytes >= kv.numel() * OUTLIER_BYTES
