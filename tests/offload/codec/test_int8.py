"""int8 elements are within half a step of the originals, token by token, at any magnitude."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.codec.int8 import dequantise, quantise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def roundtrip(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (..., D) quantised and dequantised, and the scales."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(*x.shape[:-1], 1, dtype=x.dtype)
    quantise(x, codes, scales)
    out = torch.empty_like(x)
    dequantise(codes, scales, out)
    return out, scales


@every_dtype
def test_error_is_within_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 50)[:, None]  # tokens of very different magnitudes
    x = (torch.randn(2, 3, 50, 16) * sizes).to(dtype)
    out, scales = roundtrip(x)
    error = (out.float() - x.float()).abs()
    # dequantised elements are rounded to their dtype once more
    rounding = x.float().abs() * torch.finfo(dtype).eps
    assert (error <= 0.5 * scales.float() * (1 + 2 * torch.finfo(dtype).eps) + rounding).all()
    largest = x.float().abs().amax(-1, keepdim=True)
    limit = (1.01 * largest / 127).clamp_min(torch.finfo(dtype).tiny)
    assert (scales.float() <= limit).all()


@every_dtype
def test_tokens_are_quantised_independently(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 20, 8).to(dtype)
    whole, _ = roundtrip(x)
    selected = torch.tensor([17, 3, 4])
    part, _ = roundtrip(x[:, :, selected])
    assert torch.equal(part, whole[:, :, selected])


@every_dtype
@pytest.mark.parametrize("size", [0.0, 1e-7, 3e4, None])
def test_any_magnitude_dequantises_to_finite_values(dtype: torch.dtype, size: float | None) -> None:
    size = torch.finfo(dtype).max if size is None else size
    x = torch.full((2, 1, 4, 8), size).to(dtype)
    out, _ = roundtrip(x)
    assert out.isfinite().all()
    if not size:
        assert not out.any()
    if size > 1:
        torch.testing.assert_close(out, x, atol=0.0, rtol=1e-2)


def test_input_is_not_modified() -> None:
    x = torch.randn(2, 1, 4, 8)
    before = x.clone()
    roundtrip(x)
    assert torch.equal(x, before)
