"""Rows of a matrix that stay packed as in their file, with products that need no whole matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from types import ModuleType
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from parallel.batch_invariant import is_batch_invariant
from parallel.formats.plane_format import GROUP, KeptType, PlaneFormat
from parallel.formats.tensors import BlockTensor, Indexable
from parallel.weights.codebooks import CodebookBlocks
from parallel.weights.matmul import linear, linear_fp32_out
from parallel.weights.planes import Planes, ReorderedPlanes
from parallel.weights.selection import plane_kernels


class Slice(NamedTuple):
    """A part of a tensor on disk."""

    tensor: Indexable
    rows: slice
    columns: slice

    @property
    def height(self) -> int:
        """The number of rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def kept_type(self) -> KeptType | None:
        """How the part is kept; None if it is read as numbers."""
        tensor = self.tensor
        return tensor.kept_type(self.columns) if isinstance(tensor, BlockTensor) else None


def read_numbers(slices: Sequence[Slice], values: Tensor) -> None:
    """Read slices as numbers into consecutive rows of `values` (R, columns); the rest are zero."""
    start = 0
    for each in slices:
        values[start : start + each.height].copy_(each.tensor[each.rows, each.columns])
        start += each.height
    values[start:] = 0


def reorder_heads(rows: Tensor, order: Tensor) -> None:
    """Reorder the rows (heads * D, ...) of each head in place; `order` (D,) is their old places."""
    rows.copy_(rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1))


class WholePart(Module):
    """Rows that are not packed: of float tensors, or of one that is cut inside of a block."""

    def __init__(self, values: Parameter):
        super().__init__()
        self.values, self.rows = values, len(values)


KeptPart = Planes | ReorderedPlanes | CodebookBlocks
Part = KeptPart | WholePart


class PackedRows(Module):
    """Rows (R, columns) of one or several types, one after another.

    Where a function needs a whole matrix (R, columns), slices of it give unpacked rows.
    """

    def __init__(self, columns: int, dtype: torch.dtype, device: torch.device):
        """`dtype`: of the weights when they are unpacked, and of products."""
        super().__init__()
        self.columns, self.dtype, self.device = columns, dtype, device
        self.parts = ModuleList()

    def load(self, slices: Sequence[Slice], rows: int) -> None:
        """Read slices block by block; rows after the last, up to `rows`, are zero.

        Raises CheckpointError.
        """
        runs = [list(run) for _, run in groupby(slices, key=_run_key)]
        rest = rows - sum(each.height for each in slices)
        for run in runs:
            height = sum(each.height for each in run) + (rest if run is runs[-1] else 0)
            kind = run[0].kept_type
            self.parts.append(
                self._whole_part(run, height)
                if kind is None
                else self._kept_part(kind, run, height)
            )

    def reorder_heads(self, order: Tensor, rows: int) -> None:
        """Reorder the rows of each head among the first `rows`, as the function."""
        for part, own, _ in self._overlapping(0, rows):
            for tensor in (_planes(part) or part).parameters():
                reorder_heads(tensor[own], order)

    def multiply(self, x: Tensor, first: int, out_dtype: torch.dtype) -> Tensor:
        """Return x W^T (T, R - first) with fused kernels, in x's dtype or float32."""
        outs = []
        for part, own, _ in self._overlapping(first, len(self)):
            if isinstance(part, WholePart):
                product = linear if out_dtype == x.dtype else linear_fp32_out
                outs.append(product(x, part.values[own]))
                continue
            kernels = self.kernels
            assert kernels is not None
            ordered = part.reordered(x) if isinstance(part, ReorderedPlanes) else x
            own_outs = [
                kernels.multiply(chunk, _planes(part), own.start, out_dtype)
                for chunk in ordered.split(kernels.MAX_ROWS)
            ]
            outs.append(own_outs[0] if len(own_outs) == 1 else torch.cat(own_outs))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def has_kernels(self, tokens: int) -> bool:
        """Return whether fused kernels should multiply so many rows of x.

        A batch-invariant forward always uses them if any does.
        """
        kernels = self.kernels
        return kernels is not None and (tokens <= kernels.MAX_ROWS or is_batch_invariant())

    @cached_property
    def kernels(self) -> ModuleType | None:
        """The fused kernels that multiply all parts, None if there are none for one of them."""
        packed = [part for part in self.parts if not isinstance(part, WholePart)]
        kernels = [_kernels(cast(Part, part), self.dtype) for part in packed]
        return None if None in kernels else kernels[0]

    def unpack(self, out: Tensor, first: int = 0) -> Tensor:
        """Write the rows from `first` on into `out` (rows, columns)."""
        for part, own, place in self._overlapping(first, first + len(out)):
            if isinstance(part, WholePart):
                out[place].copy_(part.values[own])
                continue
            kernels = _kernels(part, self.dtype)
            if isinstance(part, ReorderedPlanes):
                part.unpack(own, out[place], kernels)
            elif kernels is None:
                part.unpack(own, out[place])
            else:
                kernels.unpack(part, own.start, out[place])
        return out

    def select(self, rows: Tensor) -> Tensor:
        """Return rows (T, columns) by their indices (T,), if all have one format."""
        (part,) = self.parts
        if isinstance(part, WholePart):
            return F.embedding(rows, part.values)
        assert isinstance(part, KeptPart)
        return part.unpack(rows, self._empty(len(rows)))

    def __len__(self) -> int:
        return sum(part.rows for part in cast(Iterable[Part], self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return len(self), self.columns

    def __getitem__(self, rows: slice) -> Tensor:
        """Return unpacked rows (rows, columns)."""
        first, last, _ = rows.indices(len(self))
        return self.unpack(self._empty(last - first), first)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(rows, self.columns, dtype=self.dtype, device=self.device)

    def _whole_part(self, slices: Sequence[Slice], rows: int) -> WholePart:
        values = self._empty(rows)
        read_numbers(slices, values)
        return WholePart(Parameter(values, requires_grad=False))

    def _kept_part(self, kind: KeptType, slices: Sequence[Slice], rows: int) -> KeptPart:
        part = _empty_part(kind, slices[0], rows, self.device)
        start = 0
        for each in slices:
            assert isinstance(each.tensor, BlockTensor)
            for stored in each.tensor.blocks(each.rows, each.columns):
                count = len(stored if isinstance(stored, Tensor) else stored["codes"])
                try:
                    part.write(slice(start, start + count), stored)
                except ValueError as error:
                    raise each.tensor.scale_error() from error
                start += count
        part.clear(slice(start, rows))
        return part

    def _overlapping(self, first: int, last: int) -> Iterator[tuple[Part, slice, slice]]:
        """Yield the parts with rows in a range: which of its rows, and their place in the range."""
        start = 0
        for part in cast(Iterable[Part], self.parts):
            low, high = max(first, start), min(last, start + part.rows)
            if low < high:
                yield part, slice(low - start, high - start), slice(low - first, high - first)
            start += part.rows


def _run_key(each: Slice) -> tuple[KeptType | None, int | None]:
    """Return a key that is equal for slices that one part holds."""
    tensor = each.tensor
    has_own_order = isinstance(tensor, BlockTensor) and tensor.order() is not None
    return each.kept_type, id(tensor) if has_own_order else None


def _empty_part(kind: KeptType, first: Slice, rows: int, device: torch.device) -> KeptPart:
    """Return an uninitialized part for slices like the first."""
    columns = first.columns.stop - first.columns.start
    if not isinstance(kind, PlaneFormat):
        return CodebookBlocks(kind.name, rows, columns, device)
    tensor = first.tensor
    assert isinstance(tensor, BlockTensor)
    lead = first.columns.start % tensor.block // GROUP
    planes = Planes(kind, rows, columns, lead, device)
    order = tensor.order()
    return planes if order is None else ReorderedPlanes(planes, order)


def _kernels(part: Part, dtype: torch.dtype) -> ModuleType | None:
    """Return the fused kernels for a part, None if there are none."""
    planes = _planes(part)
    if planes is None:
        return None
    kernels, _ = plane_kernels(planes.low.device.type, dtype, planes.format)
    return kernels


def _planes(part: Part) -> Planes | None:
    """Return a part's planes, None if it has none."""
    part = part.planes if isinstance(part, ReorderedPlanes) else part
    return part if isinstance(part, Planes) else None
