"""Matrix products are correct in every variant, and rounded once with widened weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.weights import matmul


@pytest.mark.parametrize("rows", [1, 3, 7, 40, 200])
@pytest.mark.parametrize("shape", [(7, 5), (1500, 600), (5, 1 << 17)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_widening_rounds_once(
    rows: int, shape: tuple[int, int], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # smaller than a row of the last shape: its parts are one row
    monkeypatch.setattr(matmul, "_WIDENED_VALUES", 1 << 16)
    # few rows are computed transposed, 200 are not
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(matmul, "has_native_bf16", lambda: False)
    x, weight = torch.randn(rows, shape[1]).bfloat16(), torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    out = matmul.linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # half a unit in the last of bfloat16's eight bits; near zero, the error of float32 sums
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-3 * shape[1] ** 0.5)


@pytest.mark.parametrize(("rows", "is_widened"), [(1, False), (3, False), (4, True)])
def test_few_rows_are_not_widened(
    rows: int, is_widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(matmul, "has_native_bf16", lambda: False)
    monkeypatch.setattr(matmul, "_widened", lambda x, *_: calls.append(x) or x)
    matmul.linear(torch.randn(rows, 5).bfloat16(), torch.randn(7, 5).bfloat16())
    assert bool(calls) == is_widened


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 128, 129])
@pytest.mark.parametrize("shape", [(7, 5), (1500, 600)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_transposed_product_of_few_rows_is_correct(
    rows: int,
    shape: tuple[int, int],
    has_bias: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if has_bias else None
    out = matmul.linear(x, weight, bias)
    assert out.is_contiguous()
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    if threads == 1 or rows in (1, 129) or shape == (7, 5):
        assert torch.equal(out, expected)  # not transposed


@pytest.mark.parametrize("rows", [9, 17, 65, 128, 500, 512, 1024, 1030])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_bucketed_product_of_many_rows_is_correct(
    rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "has_native_bf16", lambda: True)
    x, weight = torch.randn(rows, 40).bfloat16(), torch.randn(30, 40).bfloat16()
    bias = torch.randn(30).bfloat16() if has_bias else None
    out = matmul.linear(x, weight, bias)
    assert out.shape == (rows, 30)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=0.05)


def test_bucketed_products_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()

    def record(rows: Tensor, weight: Tensor, out: Tensor) -> None:
        sizes.add(len(rows))
        out.zero_()

    monkeypatch.setattr(matmul, "has_native_bf16", lambda: True)
    monkeypatch.setattr(torch, "mm", record)
    weight = torch.zeros(2, 3).bfloat16()
    for rows in range(9, 2049):
        matmul.linear(torch.zeros(rows, 3).bfloat16(), weight)
    assert sizes == {0, 16, 32, 48, *range(64, 513, 64), 1024, 1536, 2048}


def test_other_dtypes_and_cpus_use_plain_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 64).half(), torch.randn(50, 64).half()
    monkeypatch.setattr(matmul, "has_native_bf16", lambda: False)
    assert torch.equal(matmul.linear(x, weight), F.linear(x, weight))
    monkeypatch.setattr(matmul, "has_native_bf16", lambda: True)
    x, weight = x.bfloat16(), weight.bfloat16()
    assert torch.equal(matmul.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_not_rounded_to_16_bits(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 300).to(dtype), torch.randn(2500, 300).to(dtype)
    out = matmul.linear_fp32_out(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
