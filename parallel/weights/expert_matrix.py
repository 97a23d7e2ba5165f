"""The matrices of a mixture's experts, stacked: whole, or packed as in their file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.formats.checkpoint import BlockTensor
from parallel.formats.plane_format import PlaneFormat
from parallel.weights.matrix import Matrix
from parallel.weights.packed import Slice


class ExpertMatrix(Matrix):
    """One matrix (rows, columns) of each of E experts, one after another.

    They stay packed only if all have the same format, in planes and in their own order of columns.
    """

    uses_scratch = False  # experts are unpacked one by one

    def __init__(self, experts: int, rows: int, columns: int):
        super().__init__(experts * rows, columns)
        self.experts, self.expert_rows = experts, rows

    @property
    def has_fused_products(self) -> bool:
        """Whether fused kernels multiply with the experts of each row."""
        return self.packed is not None and self.packed.kernels is not None

    def of(self, expert: int) -> Tensor:
        """Return an expert's matrix (rows, columns)."""
        own = slice(expert * self.expert_rows, (expert + 1) * self.expert_rows)
        if self.packed is not None:
            return self.packed[own]
        assert self.values is not None
        return self.values[own]

    def whole(self) -> Tensor:
        """Return the matrices (E, rows, columns) of all experts, which are not packed."""
        assert self.values is not None
        return self.values.unflatten(0, (self.experts, self.expert_rows))

    def select_experts(self, experts: Tensor) -> Tensor:
        """Return the matrices (S, rows, columns) of experts (S,), which are copied."""
        if self.packed is None:
            return self.whole()[experts]
        steps = torch.arange(self.expert_rows, device=experts.device)
        rows = (experts[:, None] * self.expert_rows + steps).flatten()
        return self.packed.select(rows).unflatten(0, (len(experts), self.expert_rows))

    def fused_products(self, x: Tensor, experts: Tensor, repeats: int) -> Tensor:
        """Return the products (S, rows) of rows of x with one expert's matrix each.

        Args:
            x: rows (S / repeats, columns), of which each is multiplied `repeats` times in a row.
            experts: of each product, (S,) int64.
            repeats: experts of a row.
        """
        assert self.packed is not None
        kernels = self.packed.kernels
        assert kernels is not None
        (planes,) = self.packed.parts
        out: Tensor = kernels.multiply_experts(x, planes, experts, self.expert_rows, repeats)
        return out

    def _stays_packed(self, slices: Sequence[Slice]) -> bool:
        kinds = {each.kept_type for each in slices}
        if len(kinds) > 1 or not isinstance(next(iter(kinds)), PlaneFormat):
            return False
        tensors = (each.tensor for each in slices)
        return all(isinstance(each, BlockTensor) and each.order() is None for each in tensors)
