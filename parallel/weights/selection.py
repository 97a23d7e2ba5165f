"""Selection of the kernels for matrices in planes: they are used if they pass a self-test."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from offload.self_test import Kernels, run_self_test
from parallel.formats.plane_format import GROUP, PlaneFormat
from parallel.weights.planes import Planes
from parallel.weights.routing import Routing

# sizes of the self-test: several tiles and splits, the last incomplete; and no splits
_ROWS, _COLUMNS, _LEAD = 150, 67 * GROUP, 3
_FEW_COLUMNS = 3 * GROUP
_TOLERANCE_IN_16_BITS = 1e-2
_TOLERANCE = 1e-5  # error of float32 sums, as a share of the largest


@cache
def plane_kernels(device: str, dtype: torch.dtype, fmt: PlaneFormat) -> Kernels:
    """Return `parallel.weights.kernels` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the activations.
        fmt: of the matrix.
    """
    if dtype.itemsize != 2:
        return None, f"there are none for {dtype}"
    return run_self_test("parallel.weights.kernels", _test_planes, device, dtype, fmt)


def _test_planes(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, fmt: PlaneFormat
) -> None:
    """Raise RuntimeError if a kernel is wrong, or a row's product depends on the other rows."""
    name = fmt.name
    planes = random_planes(fmt, _ROWS, _COLUMNS, _LEAD, device)
    expected = planes.unpack(slice(None), torch.empty(_ROWS, _COLUMNS, dtype=dtype, device=device))
    actual = kernels.unpack(planes, 1, torch.empty_like(expected[1:]))
    if not torch.equal(actual, expected[1:]):
        raise RuntimeError(f"{name} is unpacked incorrectly")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(kernels.MAX_ROWS, _COLUMNS, generator=generator).to(device, dtype)
    whole = kernels.multiply(x, planes, 1, torch.float32)
    product = x.double() @ expected[1:].double().t()
    error = float((whole - product).abs().max() / product.abs().max())
    if not error < _TOLERANCE:
        raise RuntimeError(f"products with {name} are off by {error:.3g}")
    rows = kernels.MAX_ROWS
    for first, last in ((3, 4), (0, rows // 4 + 1), (rows // 2 + 3, rows)):
        alone = kernels.multiply(x[first:last], planes, 1, torch.float32)
        if not torch.equal(alone, whole[first:last]):
            raise RuntimeError(f"products with {name} depend on other rows")
    # Without splits, results in 16 bits are written by another variant of the kernel.
    few = random_planes(fmt, _ROWS, _FEW_COLUMNS, _LEAD, device)
    weights = few.unpack(slice(None), expected.new_empty(_ROWS, _FEW_COLUMNS)).double()
    for count in (1, rows // 4 + 1, rows):
        part = x[:count, :_FEW_COLUMNS]
        out, exact = kernels.multiply(part, few, 0, dtype), part.double() @ weights.t()
        error = float((out - exact).abs().max() / exact.abs().max())
        if not error < _TOLERANCE_IN_16_BITS:
            raise RuntimeError(f"products with {name} in {dtype} are off by {error:.3g}")
    # Three experts, one of which multiplies more rows than a program does at once; with splits and
    # without them.
    routing = Routing.of(torch.tensor([2, 0] + [1] * 17 + [2], device=device), 3)
    each = _ROWS // 3
    for matrix in (planes, few):
        width = matrix.columns
        weights = matrix.unpack(slice(None), expected.new_empty(_ROWS, width)).double()
        own = x[: len(routing.experts) // 2, :width]
        out = kernels.multiply_experts(own, matrix, routing, each, 2)
        for at, expert in enumerate(routing.experts.tolist()):
            exact = weights[expert * each :][:each] @ own[at // 2].double()
            error = float((out[at] - exact).abs().max() / exact.abs().max())
            if not error < _TOLERANCE_IN_16_BITS:
                raise RuntimeError(f"products of experts with {name} are off by {error:.3g}")


def random_planes(
    fmt: PlaneFormat, rows: int, columns: int, lead: int, device: torch.device, seed: int = 0
) -> Planes:
    """Return a matrix of random codes and scales, of about the size of a model's weights."""
    generator = torch.Generator().manual_seed(seed)
    planes = Planes(fmt, rows, columns, lead if fmt.scale_groups > 1 else 0, device)
    for part, plane in planes.named_parameters():
        if plane.is_floating_point():
            values = torch.randn(plane.shape, generator=generator) * 1e-4
        elif part == "sub" and planes.format.sub_kind == "e8m0":  # near 2 ** -7
            values = torch.randint(118, 124, plane.shape, generator=generator)
        else:
            info = torch.iinfo(plane.dtype)
            values = torch.randint(info.min, info.max + 1, plane.shape, generator=generator)
            if part == "low" and fmt.is_float:
                values[values & 127 == 127] = 0  # NaN
            if part == "minimum" and fmt.has_zero and fmt.bits == 4:
                values &= 15
        plane.copy_(values)
    return planes
