"""Kernels for matrices in planes, in triton's interpreter and, on a GPU, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.formats.plane_format import PLANE_FORMATS, group_format
from parallel.weights.planes import Planes
from parallel.weights.routing import Routing
from parallel.weights.selection import _test_planes, plane_kernels, random_planes
from support.interpreter import import_interpreted
from support.slow import slow_except

GROUPS = [
    group_format("int4", 128, "float16", has_zero=True),
    group_format("int4", 32, "bfloat16", has_zero=False),
    group_format("int8", 64, "float16", has_zero=True),
    group_format("int8", 0, "float32", has_zero=False),
    group_format("e4m3", 128, "bfloat16", has_zero=False),
    group_format("e4m3", 0, "float32", has_zero=False),
]
FORMATS = {fmt.name: fmt for fmt in [*PLANE_FORMATS.values(), *GROUPS] if fmt is not None}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
CPU = torch.device("cpu")


@pytest.fixture
def kernels() -> Any:
    return import_interpreted("parallel.weights.kernels")


# The interpreter truncates float32 to bfloat16 instead of rounding: it is tested on a GPU.
@pytest.mark.slow
@EVERY_FORMAT
def test_self_test_succeeds(kernels: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SPLIT_GROUPS", 8)
    monkeypatch.setattr(kernels, "MAX_ROWS", 16)  # numpy multiplies larger tiles in another order
    assert kernels.split_count(150, 67) > 1
    _test_planes(kernels, CPU, torch.float16, FORMATS[name])


@EVERY_FORMAT
def test_unpacked_weights_equal_those_of_plain_operations(kernels: Any, name: str) -> None:
    for lead, columns in ((0, 32), (5, 352), (0, 544)):
        planes = random_planes(FORMATS[name], 9, columns, lead, CPU, seed=lead)
        for dtype in (torch.float32, torch.float16):
            expected = planes.unpack(slice(2, 9), torch.empty(7, columns, dtype=dtype))
            out = torch.full_like(expected, torch.nan)
            assert torch.equal(kernels.unpack(planes, 2, out), expected)


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_products_of_any_number_of_rows(kernels: Any, rows: int) -> None:
    planes = random_planes(FORMATS["Q5_K"], 70, 416, 2, CPU)
    weights = planes.unpack(slice(None), torch.empty(70, 416, dtype=torch.float16)).double()
    x = torch.randn(rows, 416).half()
    for dtype in (torch.float16, torch.float32):
        out = kernels.multiply(x, planes, 0, dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), x.double() @ weights.t(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("repeats", slow_except([1, 3], 1))
@pytest.mark.parametrize("name", slow_except(["Q4_K", "Q6_K", "MXFP4"]))
def test_products_of_experts(kernels: Any, name: str, repeats: int) -> None:
    """Each is that of the expert's own matrix, bit for bit, and one expert has none."""
    planes = random_planes(FORMATS[name], 5 * 70, 416, 0, CPU)
    experts = torch.tensor([4, 0, 0, 2, 3, 4])
    x = torch.randn(len(experts) // repeats, 416).half()
    out = kernels.multiply_experts(x, planes, Routing.of(experts, 5), 70, repeats)
    assert out.shape == (6, 70)
    for product, expert in enumerate(experts.tolist()):
        own = Planes(planes.format, 70, 416, 0, CPU)
        for part, plane in own.named_parameters():
            plane.copy_(getattr(planes, part)[expert * 70 : (expert + 1) * 70])
        row = product // repeats
        assert torch.equal(out[product], kernels.multiply(x[row : row + 1], own, 0, x.dtype)[0])


def test_an_expert_of_more_rows_than_a_program_has(kernels: Any) -> None:
    planes = random_planes(FORMATS["Q4_K"], 2 * 64, 96, 0, CPU)
    weights = planes.unpack(slice(None), torch.empty(128, 96, dtype=torch.float16)).double()
    experts = torch.tensor([0] * 5 + [1] * 20 + [0] * 30)
    x = torch.randn(55, 96).half()
    out = kernels.multiply_experts(x, planes, Routing.of(experts, 2), 64, 1)
    expected = torch.stack(
        [weights[64 * expert :][:64] @ row for expert, row in zip(experts, x.double(), strict=True)]
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_self_test_finds_wrong_experts(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_ROWS", 16)
    multiply_experts = kernels.multiply_experts

    def multiply_others(x: Any, planes: Any, routing: Routing, *args: Any) -> Any:
        others = Routing.of(routing.experts.flip(0), len(routing.ends))
        return multiply_experts(x, planes, others, *args)

    monkeypatch.setattr(kernels, "multiply_experts", multiply_others)
    with pytest.raises(RuntimeError, match="products of experts with Q4_K are off"):
        _test_planes(kernels, CPU, torch.float16, FORMATS["Q4_K"])


@pytest.mark.parametrize(
    ("plane", "message"),
    slow_except([("low", "unpacked incorrectly"), ("scale", "unpacked incorrectly")]),
)
def test_self_test_finds_wrong_weights(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, plane: str, message: str
) -> None:
    unpack = Planes.unpack

    def unpack_otherwise(self: Planes, rows: Any, out: Any) -> Any:
        other = random_planes(self.format, self.rows, self.columns, self.lead, CPU)
        getattr(other, plane).view(torch.uint8)[-1, -1] ^= 16
        return unpack(other, rows, out)

    monkeypatch.setattr(Planes, "unpack", unpack_otherwise)
    with pytest.raises(RuntimeError, match=message):
        _test_planes(kernels, CPU, torch.float16, FORMATS["Q4_K"])


@pytest.mark.slow
def test_self_test_finds_a_product_that_depends_on_other_rows(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_ROWS", 16)
    multiply = kernels.multiply

    def multiply_otherwise(x: Any, *args: Any) -> Any:
        return multiply(x, *args) * (1 + 1e-7 * len(x))

    monkeypatch.setattr(kernels, "multiply", multiply_otherwise)
    with pytest.raises(RuntimeError, match="depend on other rows"):
        _test_planes(kernels, CPU, torch.float16, FORMATS["Q4_K"])


def test_there_are_none_for_float32_and_on_a_cpu() -> None:
    assert plane_kernels("cuda", torch.float32, FORMATS["Q4_K"])[0] is None
    assert plane_kernels("cpu", torch.bfloat16, FORMATS["Q4_K"]) == (None, "there are none for cpu")


@pytest.mark.cuda(standin=False)
@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    kernels, reason = plane_kernels("cuda", dtype, FORMATS[name])
    assert kernels is not None, reason
    planes = random_planes(FORMATS[name], 300, 2048 + 96, 3, torch.device("cuda"))
    expected = planes.unpack(slice(None), torch.empty(300, 2144, dtype=dtype, device="cuda"))
    cpu = random_planes(FORMATS[name], 300, 2048 + 96, 3, CPU)
    assert torch.equal(expected.cpu(), cpu.unpack(slice(None), torch.empty(300, 2144, dtype=dtype)))
    assert kernels.split_count(300, planes.groups) > 1
    x = torch.randn(64, 2144, device="cuda").to(dtype)
    whole = kernels.multiply(x, planes, 0, torch.float32)
    product = x.double() @ expected.double().t()
    assert (whole - product).abs().max() <= 1e-5 * product.abs().max()
    for count in (1, 2, 16, 33):
        assert torch.equal(
            kernels.multiply(x[5 : 5 + count], planes, 0, torch.float32), whole[5 : 5 + count]
        )
    few = random_planes(FORMATS[name], 300, 96, 3, torch.device("cuda"))  # not split
    for matrix, width in ((planes, 2144), (few, 96)):
        routing = Routing.of(torch.tensor([2, 0, 2, 1] * 16, device="cuda"), 3)
        weights = matrix.unpack(slice(None), torch.empty(300, width, dtype=dtype, device="cuda"))
        out = kernels.multiply_experts(x[:32, :width], matrix, routing, 100, 2)
        for product, expert in enumerate(routing.experts.tolist()):
            exact = weights[expert * 100 :][:100].double() @ x[product // 2, :width].double()
            assert (out[product] - exact).abs().max() <= 1e-2 * exact.abs().max()
        alone = Routing.of(routing.experts[:2], 3)
        first = kernels.multiply_experts(x[:1, :width], matrix, alone, 100, 2)
        assert torch.equal(first, out[:2])
