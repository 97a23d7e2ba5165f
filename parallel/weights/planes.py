"""A matrix in planes (`plane_format`), and the plain expression that unpacks it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from offload.layout import ceil_div
from parallel.formats.plane_format import GROUP, MAX_E8M0, PlaneFormat
from parallel.formats.tensors import Parts
from parallel.weights.ggml_blocks import pack_codes, split_blocks

_HALF = GROUP // 2
_UNPACKED = 1 << 18  # weights unpacked at once, few enough for a CPU's cache
_UNPACKED_ON_GPU = 1 << 22  # on another device, where each operation is a launch


class Planes(Module):
    """Rows of a matrix (R, columns) in one format; `columns` is a multiple of GROUP.

    Planes that the format lacks are None. Memory is uninitialized until rows are written.
    """

    low: Tensor  # codes, or their low 4 bits
    high: Tensor | None
    scale: Tensor | None
    minimum: Tensor | None  # or the zero
    sub: Tensor | None
    submin: Tensor | None

    def __init__(self, fmt: PlaneFormat, rows: int, columns: int, lead: int, device: torch.device):
        """`lead`: groups before the first column that share its scale."""
        super().__init__()
        self.format, self.columns, self.lead = fmt, columns, lead
        self.fixed: Any = None  # launch arguments that never change
        groups = columns // GROUP
        scales = ceil_div(lead + groups, fmt.scale_groups) if fmt.scale_groups else 0
        subs = columns // fmt.sub if fmt.sub else 0
        sub_dtype = torch.int8 if fmt.sub_kind == "int8" else torch.uint8
        shapes = {
            "low": (columns // 2, torch.uint8),
            "high": (groups * (fmt.bits - 4), torch.int32),
            "scale": (scales, getattr(torch, fmt.scale_type)),
            "minimum": (scales if fmt.has_minimum or fmt.has_zero else 0, torch.float16),
            "sub": (subs, sub_dtype),
            "submin": (subs if fmt.has_minimum else 0, torch.uint8),
        }
        if fmt.has_zero:
            shapes["minimum"] = scales, torch.int8 if fmt.bits == 8 else torch.uint8
        if fmt.bits == 8:
            shapes |= {"low": (columns, torch.int8), "high": (0, torch.int32)}
        for name, (width, dtype) in shapes.items():
            plane = torch.empty(rows, width, dtype=dtype, device=device) if width else None
            parameter = None if plane is None else Parameter(plane, requires_grad=False)
            self.register_parameter(name, parameter)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.low)

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return self.columns // GROUP

    @property
    def nbytes(self) -> int:
        """Return the bytes of all planes."""
        return sum(plane.nbytes for plane in self.parameters())

    def write(self, rows: slice, stored: Tensor | Parts) -> None:
        """Store rows, as blocks (R, B, bytes of a block) uint8 or as their parts.

        Blocks are ggml's, the first of which holds the first column. The codes of parts are those
        of the columns. Raises ValueError for a scale or a code that is not finite.
        """
        if isinstance(stored, Tensor):
            parts = split_blocks(self.format.name, stored)
            first = self.lead * GROUP
            parts["codes"] = parts["codes"][:, first : first + self.columns]
            for name in parts.keys() & {"sub", "submin"}:  # those of whole blocks
                plane, start = getattr(self, name), first // self.format.sub
                parts[name] = parts[name][:, start : start + plane.shape[1]].view(plane.dtype)
        else:
            parts = dict(stored)
            if "zero" in parts:
                parts["minimum"] = parts.pop("zero")
        codes = parts.pop("codes")
        if self.format.is_float and bool((codes.view(torch.uint8) & 127 == 127).any()):
            raise ValueError("a code is not finite")
        if self.format.sub_kind == "e8m0" and bool((parts["sub"] > MAX_E8M0).any()):
            raise ValueError("a scale is not finite")
        parts["low"], high = pack_codes(codes, self.format.bits)
        if high is not None:
            parts["high"] = high
        for name, values in parts.items():
            if values.is_floating_point() and not values.isfinite().all():
                raise ValueError("a scale is not finite")
            getattr(self, name)[rows].copy_(values)

    def clear(self, rows: slice) -> None:
        """Write rows of zeros."""
        for plane in self.parameters():
            plane[rows] = 0

    def unpack(self, rows: slice | Tensor, out: Tensor) -> Tensor:
        """Write rows (R, columns), a slice of them or indices, into `out` in its dtype."""
        if isinstance(rows, slice):
            first, last, _ = rows.indices(self.rows)
            parts: Iterator[slice | Tensor] = (
                slice(start, min(start + self.step, last))
                for start in range(first, last, self.step)
            )
        else:
            parts = iter(rows.split(self.step))
        for part, target in zip(parts, out.split(self.step), strict=True):
            self._values(part, target.view(len(target), self.groups, 2, _HALF))
        return out

    @property
    def step(self) -> int:
        """The number of rows that are unpacked at once."""
        limit = _UNPACKED if self.low.is_cpu else _UNPACKED_ON_GPU
        return max(1, limit // self.columns)

    def _values(self, rows: slice | Tensor, out: Tensor) -> None:
        """Write rows into `out` (R, groups, 2, 16)."""
        fmt = self.format
        by_group = out.shape[1]
        if fmt.bits == 8:
            codes = self.low[rows].view(out.shape)
            weights = (codes.view(torch.float8_e4m3fn) if fmt.is_float else codes).float()
        else:
            low = self.low[rows].view(-1, by_group, _HALF)
            codes = torch.stack((low & 15, low >> 4), dim=2)
            if self.high is not None:
                codes |= _high_bits(self.high[rows], by_group, fmt.bits - 4)
            if fmt.values:
                weights = value_table(fmt.values, out.device)[codes.int()]
            else:
                weights = codes.float()
                weights = weights.sub_(fmt.offset) if fmt.offset else weights
        scale = self._per_group(self.scale, rows)
        minimum = self._per_group(self.minimum, rows)
        if self.sub is not None:
            sub = self._sub_scales(self.sub[rows], by_group)
            scale = sub if scale is None else scale * sub
        if self.submin is not None and minimum is not None:
            minimum = minimum * self._sub_scales(self.submin[rows], by_group)
        if fmt.has_zero and minimum is not None:
            weights.sub_(minimum)
            minimum = None
        assert scale is not None
        weights.mul_(scale)
        if minimum is not None:
            weights.add_(minimum)
        out.copy_(weights)

    def _per_group(self, plane: Tensor | None, rows: slice | Tensor) -> Tensor | None:
        """Return a scale (R, groups, 1, 1) float32 of each group."""
        if plane is None:
            return None
        scales = plane[rows].float()
        if scales.shape[1] > 1 and self.format.scale_groups > 1:
            repeated = scales[..., None].expand(-1, -1, self.format.scale_groups).flatten(1)
            scales = repeated[:, self.lead : self.lead + self.groups]
        return scales[..., None, None]

    def _sub_scales(self, plane: Tensor, groups: int) -> Tensor:
        """Return group scales (R, groups, 1 or 2, 1) float32."""
        scales = plane.float()
        if self.format.has_float_subs:
            scales = float_bytes(self.format.sub_kind, plane.device)[plane.int()]
        return scales.view(len(plane), groups, -1, 1)


class ReorderedPlanes(Module):
    """Planes whose columns have an order of their own, in which groups are contiguous."""

    def __init__(self, planes: Planes, order: Tensor):
        """`order` (columns,) int64: the column that each of the planes stands for."""
        super().__init__()
        self.planes = planes
        self.order = Parameter(order.to(planes.low.device), requires_grad=False)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.planes.rows

    def write(self, rows: slice, stored: Tensor | Parts) -> None:
        """Store rows, as `Planes` does; their codes are in the planes' order."""
        self.planes.write(rows, stored)

    def clear(self, rows: slice) -> None:
        """Write rows of zeros."""
        self.planes.clear(rows)

    def reordered(self, x: Tensor) -> Tensor:
        """Return activations (T, columns) in the planes' order."""
        return x.index_select(1, self.order)

    def unpack(
        self, rows: slice | Tensor, out: Tensor, kernels: ModuleType | None = None
    ) -> Tensor:
        """Write rows (R, columns), a slice of them or indices, into `out` in its dtype.

        `kernels` unpack a slice, if given.
        """
        step, start = self.planes.step, 0
        for target in out.split(step):
            values = torch.empty_like(target)
            if isinstance(rows, Tensor):
                self.planes.unpack(rows[start : start + step], values)
            elif kernels is None:
                first = rows.start + start
                self.planes.unpack(slice(first, first + len(target)), values)
            else:
                kernels.unpack(self.planes, rows.start + start, values)
            target.index_copy_(1, self.order, values)
            start += step
        return out


def _high_bits(high: Tensor, groups: int, bits: int) -> Tensor:
    """Return the high bits (R, groups, 2, 16) of codes, in their place above the low 4."""
    fields = high.view(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=high.device)
    unpacked = (fields[..., None] >> shifts) & ((1 << bits) - 1)
    return (unpacked << 4).view(-1, groups, 2, _HALF)


@cache
def value_table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the values of codes, float32."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def float_bytes(kind: str, device: torch.device) -> Tensor:
    """Return the numbers (256,) float32 that bytes of a kind stand for, halved.

    ggml halves them, since its values of e2m1 are doubled. e8m0 is 2 ** (byte - 127); ue4m3 is e4m3
    without a sign, in which 127 stands for 0. Source: OCP Microscaling Formats 1.0, section 5.
    """
    bytes_ = torch.arange(256, dtype=torch.int32)
    if kind == "e8m0":
        table = torch.exp2(bytes_.double() - 128).float()
    else:
        exponent, mantissa = (bytes_ >> 3 & 15).double(), (bytes_ & 7).double()
        normal = (1 + mantissa / 8) * torch.exp2(exponent - 7)
        table = (torch.where(exponent == 0, mantissa * 2.0**-9, normal) / 2).float()
        table[[0, 127]] = 0.0
    return table.to(device)
