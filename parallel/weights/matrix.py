"""A matrix of weights on this rank's device, and its products: whole, or packed as in its file.

A packed weight is exactly the weight that a whole matrix would hold: its file's number in float32,
rounded once to the run's dtype. So packing changes memory and time, and never a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from parallel.weights.matmul import linear, linear_fp32_out
from parallel.weights.packed import PackedRows, Slice, read_numbers, reorder_heads

_UNPACKED_BYTES = 64 << 20  # bytes of a head's rows that are unpacked at once


class Scratch:
    """Memory in which matrices are unpacked, one of each name: those of one layer.

    In a layer-major prefill a layer's matrices are unpacked once, for all chunks, unless captured
    forwards may write here in between: on a GPU, if a matrix has no fused kernels.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        # weak: a cycle of references would outlive a model
        self._owners: dict[str, ReferenceType[Matrix]] = {}
        self._may_reuse = True

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, name: str, matrix: Matrix) -> None:
        """Have room for a matrix of this name, if it is packed and unpacked as a whole."""
        if matrix.packed is None or not matrix.uses_scratch:
            return
        size, buffer = matrix.rows * matrix.columns, self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers[name] = torch.empty(size, dtype=matrix.dtype, device=matrix.device)
        matrix.scratch = self, name
        if matrix.device.type != "cpu" and matrix.packed.kernels is None:
            self._may_reuse = False

    def reserve_all(self, layer: Module) -> None:
        """Have room for all matrices of a layer."""
        for name, module in layer.named_modules():
            if isinstance(module, Matrix):
                self.reserve(name, module)

    def unpacked(self, matrix: Matrix, name: str) -> Tensor:
        """Return a matrix (rows, columns), which is valid until another of its name is unpacked."""
        assert matrix.packed is not None
        out = self._buffers[name][: matrix.rows * matrix.columns].view(matrix.rows, -1)
        owner = self._owners.pop(name, None)  # stays without one if unpacking fails
        if owner is None or owner() is not matrix or not self._may_reuse:
            matrix.packed.unpack(out)
        self._owners[name] = ref(matrix)
        return out


class Matrix(Module):
    """Weight matrices with the same input, stacked: this rank's rows and columns of them.

    `values` (rows, columns) holds them as numbers, or `packed` as in their file.
    """

    values: Parameter | None
    uses_scratch = True  # to be unpacked at once

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.rows, self.columns = rows, columns
        self.values = empty_parameter(rows, columns)
        self.packed: PackedRows | None = None
        self.scratch: tuple[Scratch, str] | None = None
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def prepare(self, dtype: torch.dtype, device: torch.device) -> None:
        """Set the dtype and the device of weights, before memory is allocated."""
        self.dtype, self.device = dtype, device

    def allocate(self) -> Parameter:
        """Allocate and return `values`, uninitialized."""
        self.values = empty_parameter(self.rows, self.columns, dtype=self.dtype, device=self.device)
        return self.values

    def load(self, slices: Sequence[Slice]) -> None:
        """Read the rows of the matrix, in order; rows after the last are zero.

        Raises CheckpointError.
        """
        if self._stays_packed(slices):
            self.values = None
            self.packed = PackedRows(self.columns, self.dtype, self.device)
            self.packed.load(slices, self.rows)
            return
        read_numbers(slices, self.allocate())

    def reorder_heads(self, order: Tensor, rows: int) -> None:
        """Reorder the rows of each head among the first `rows`, as `packed.reorder_heads`."""
        if self.packed is not None:
            self.packed.reorder_heads(order, rows)
        else:
            assert self.values is not None
            reorder_heads(self.values[:rows], order)

    def product(self, x: Tensor, bias: Tensor | None = None, first: int = 0) -> Tensor:
        """Return x W^T + b (T, rows - first) of x (T, columns), skipping the first rows."""
        packed = self.packed
        if packed is None:
            assert self.values is not None
            values = self.values[first:] if first else self.values
            return linear(x, values, bias)
        if packed.has_kernels(len(x)):
            if bias is None:
                return packed.multiply(x, first, x.dtype)
            return (packed.multiply(x, first, torch.float32) + bias).to(x.dtype)
        if self.scratch is None:
            return linear(x, packed[first:], bias)
        scratch, name = self.scratch
        return linear(x, scratch.unpacked(self, name)[first:], bias)

    def logits(self, x: Tensor) -> Tensor:
        """Return x W^T (T, rows) float32 of x (T, columns), as `linear_fp32_out`."""
        packed = self.packed
        if packed is None:
            assert self.values is not None
            return linear_fp32_out(x, self.values)
        if packed.has_kernels(1):
            return packed.multiply(x, 0, torch.float32)
        if x.is_cpu and x.dtype != torch.float32:  # in parts of rows
            return linear_fp32_out(x, packed)
        step = max(1, _UNPACKED_BYTES // (self.columns * self.dtype.itemsize))
        starts = range(0, self.rows, step)
        parts = [linear_fp32_out(x, packed[start : start + step]) for start in starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def select(self, rows: Tensor) -> Tensor:
        """Return rows (T, columns) by their indices (T,)."""
        if self.packed is not None:
            return self.packed.select(rows)
        assert self.values is not None
        return F.embedding(rows, self.values)

    def _stays_packed(self, slices: Sequence[Slice]) -> bool:
        """Return whether these parts of tensors are kept as in their files."""
        return any(each.kept_type for each in slices)


def empty_parameter(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Parameter:
    """Return an uninitialized parameter without gradient, to be loaded."""
    return Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
