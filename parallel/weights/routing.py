"""Which products with experts there are, in device memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Which expert each of S products is with, and the products of each expert.

    All is in device memory and of static shape, so that it can be captured.
    """

    experts: Tensor  # (S,) int64
    order: Tensor  # (S,) int64: products by their expert
    ends: Tensor  # (E,) int64: of each expert's part of the order

    @classmethod
    def of(cls, experts: Tensor, count: int) -> Routing:
        """Return the routing to `experts` (S,) of `count`."""
        chosen = experts[:, None] == torch.arange(count, device=experts.device)
        return cls(experts, experts.argsort(stable=True), chosen.sum(0).cumsum(0))
