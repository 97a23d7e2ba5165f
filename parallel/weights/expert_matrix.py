"""The matrices of a mixture's experts, stacked: whole, or packed as in their file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.config.parameter_count import max_gathered
from parallel.errors import CheckpointError
from parallel.formats.plane_format import PlaneFormat
from parallel.formats.tensors import BlockTensor
from parallel.weights.matrix import Matrix
from parallel.weights.packed import Slice
from parallel.weights.routing import Routing


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

    def products(self, x: Tensor, routing: Routing, repeats: int) -> Tensor:
        """Return the products (S, rows) of rows of x with one expert's matrix each.

        Fused kernels unpack an expert once for all rows that chose it. Without them the matrices of
        a few experts at a time are gathered.

        Args:
            x: rows (S / repeats, columns), of which each is multiplied `repeats` times in a row.
            routing: the expert of each product.
            repeats: experts of a row.
        """
        if self.has_fused_products:
            assert self.packed is not None
            kernels = self.packed.kernels
            assert kernels is not None
            (planes,) = self.packed.parts
            out: Tensor = kernels.multiply_experts(x, planes, routing, self.expert_rows, repeats)
            return out
        rows = x.repeat_interleave(repeats, dim=0)[:, None]  # (S, 1, columns)
        step = max_gathered(self.experts)
        parts = zip(rows.split(step), routing.experts.split(step), strict=True)
        outs = [torch.bmm(part, self._select(own).transpose(1, 2)) for part, own in parts]
        return torch.cat(outs)[:, 0]

    def _select(self, experts: Tensor) -> Tensor:
        """Return the matrices (S, rows, columns) of experts (S,), which are copied."""
        if self.packed is None:
            return self.whole()[experts]
        steps = torch.arange(self.expert_rows, device=experts.device)
        rows = (experts[:, None] * self.expert_rows + steps).flatten()
        return self.packed.select(rows).unflatten(0, (len(experts), self.expert_rows))

    def _stays_packed(self, slices: Sequence[Slice]) -> bool:
        kinds = {each.kept_type for each in slices}
        kind = next(iter(kinds))
        if len(kinds) > 1 or not isinstance(kind, PlaneFormat) or kind.order:
            return False
        for each in slices:
            assert isinstance(each.tensor, BlockTensor)
            if each.tensor.order() is not None:
                raise CheckpointError(
                    f"{each.tensor.path}: columns of {each.tensor.name} are in an order of their "
                    "own (g_idx), though its config has no desc_act: use `weights` 16-bit."
                )
        return True
