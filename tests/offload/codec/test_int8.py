"""Elements in 8 bits are as near as 127 steps can be, token by token, whatever their size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.codec.int8 import dequantise, quantise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what stands for x (..., D), and the scales."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(*x.shape[:-1], 1, dtype=x.dtype)
    quantise(x, codes, scales)
    out = torch.empty_like(x)
    dequantise(codes, scales, out)
    return out, scales


@every_dtype
def test_no_element_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 50)[:, None]  # tokens of very different sizes
    x = (torch.randn(2, 3, 50, 16) * sizes).to(dtype)
    out, scales = there_and_back(x)
    error = (out.float() - x.float()).abs()
    # what stands for an element is rounded to its dtype once more
    rounding = x.float().abs() * torch.finfo(dtype).eps
    assert (error <= 0.5 * scales.float() * (1 + 2 * torch.finfo(dtype).eps) + rounding).all()
    largest = x.float().abs().amax(-1, keepdim=True)
    wanted = (1.01 * largest / 127).clamp_min(torch.finfo(dtype).tiny)
    assert (scales.float() <= wanted).all()


@every_dtype
def test_a_token_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 20, 8).to(dtype)
    whole, _ = there_and_back(x)
    some = torch.tensor([17, 3, 4])
    part, _ = there_and_back(x[:, :, some])
    assert torch.equal(part, whole[:, :, some])


@every_dtype
@pytest.mark.parametrize("size", [0.0, 1e-7, 3e4, None])
def test_tokens_of_any_size_are_finite(dtype: torch.dtype, size: float | None) -> None:
    size = torch.finfo(dtype).max if size is None else size
    x = torch.full((2, 1, 4, 8), size).to(dtype)
    out, _ = there_and_back(x)
    assert out.isfinite().all()
    if not size:
        assert not out.any()
    if size > 1:
        torch.testing.assert_close(out, x, atol=0.0, rtol=1e-2)


def test_float32_is_left_as_it_was() -> None:
    x = torch.randn(2, 1, 4, 8)
    before = x.clone()
    there_and_back(x)
    assert torch.equal(x, before)
