"""A product with widened weights is the product, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model import matmul as products


@pytest.mark.parametrize("rows", [1, 3, 7, 40, 200])
@pytest.mark.parametrize("shape", [(7, 5), (1500, 600), (5, 1 << 17)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_widening_rounds_once(
    rows: int, shape: tuple[int, int], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that a part of the last shape is one row
    monkeypatch.setattr(products, "_WIDENED_VALUES", 1 << 16)
    # of few rows the other way round, of 200 not
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(products, "has_native_bf16", lambda: False)
    x, weight = torch.randn(rows, shape[1]).bfloat16(), torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    out = products.linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # half a unit of bfloat16's eight bits, and what summing in float32 adds near zero
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-3 * shape[1] ** 0.5)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 128, 129])
@pytest.mark.parametrize("shape", [(7, 5), (1500, 600)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_rows_the_other_way_round_are_the_product(
    rows: int,
    shape: tuple[int, int],
    has_bias: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if has_bias else None
    out = products.linear(x, weight, bias)
    assert out.is_contiguous()
    same = F.linear(x, weight, bias)
    torch.testing.assert_close(out, same, rtol=1e-5, atol=1e-4)
    if threads == 1 or rows in (1, 129) or shape == (7, 5):
        assert torch.equal(out, same)  # it is the ordinary one


@pytest.mark.parametrize("rows", [9, 17, 65, 128, 500, 512, 1024, 1030])
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_in_few_shapes_are_the_product(
    rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_native_bf16", lambda: True)
    x, weight = torch.randn(rows, 40).bfloat16(), torch.randn(30, 40).bfloat16()
    bias = torch.randn(30).bfloat16() if has_bias else None
    out = products.linear(x, weight, bias)
    assert out.shape == (rows, 30)
    same = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(out.float(), same, rtol=2**-7, atol=0.05)


def test_numbers_of_rows_that_are_compiled_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def noting(rows: Tensor, weight: Tensor, out: Tensor) -> None:
        seen.add(len(rows))
        out.zero_()

    monkeypatch.setattr(products, "has_native_bf16", lambda: True)
    monkeypatch.setattr(torch, "mm", noting)
    weight = torch.zeros(2, 3).bfloat16()
    for rows in range(9, 2049):
        products.linear(torch.zeros(rows, 3).bfloat16(), weight)
    assert seen == {0, 16, 32, 48, *range(64, 513, 64), 1024, 1536, 2048}


def test_other_dtypes_and_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 64).half(), torch.randn(50, 64).half()
    monkeypatch.setattr(products, "has_native_bf16", lambda: False)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    monkeypatch.setattr(products, "has_native_bf16", lambda: True)
    x, weight = x.bfloat16(), weight.bfloat16()
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_not_rounded_to_16_bits(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 300).to(dtype), torch.randn(2500, 300).to(dtype)
    out = products.linear_fp32_out(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
