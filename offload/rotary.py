"""Tables for rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Caches apply them, since positions are known to caches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Rows of a Rotary's tables."""

    cos: Tensor  # (T, 1, D)
    sin: Tensor  # (T, 1, D)
    query_scale: Tensor | None = None  # (T, 1, 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> Angles:
        """Return the results of a function on each."""
        scale = self.query_scale
        return Angles(
            function(self.cos), function(self.sin), None if scale is None else function(scale)
        )

    def scaled(self, q: Tensor) -> Tensor:
        """Return queries (T, H, head_dim), scaled if the model's depend on their positions."""
        return q if self.query_scale is None else q * self.query_scale


class Rotary:
    """cos and sin for positions 0 to length - 1, and the layers without position embedding.

    D is the number of rotated dimensions: the first of a head, or all. The tables are computed in
    float32 and stored in the model's dtype, as in transformers.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        scale: float,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        nope_layers: Collection[int] = (),
    ):
        """Compute the tables.

        `inv_freq` is (D / 2,) float32; `scale` multiplies cos and sin (YaRN's attention factor).
        `nope_layers` have no position embedding.
        """
        self.nope_layers = frozenset(nope_layers)
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq.to(device)  # (length, D / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # (length, 1, D)
        self.cos = (angles.cos() * scale).to(dtype)
        # includes the sign of rotate_half
        first, second = _halves((angles.sin() * scale).to(dtype))
        self.sin = torch.cat((-first, second), dim=-1)
        self.query_scale: Tensor | None = None  # (length, 1, 1)

    def scale_queries(self, beta: float, positions: int) -> None:
        """Scale the queries of each position, by 1 + beta log(1 + floor(position / positions))."""
        index = torch.arange(self.length, dtype=torch.float32, device=self.cos.device)
        scale = 1 + beta * torch.log(1 + torch.floor(index / positions))
        self.query_scale = scale.to(self.cos.dtype)[:, None, None]

    def first(self, length: int) -> Rotary:
        """Return the tables of the first positions alone, in memory of their own."""
        rotary = copy(self)
        own = self.angles(0, length).map(torch.clone)
        rotary.cos, rotary.sin, rotary.query_scale = own
        return rotary

    @property
    def length(self) -> int:
        return len(self.cos)

    def queries(self, q: Tensor, start: int, layer: int) -> Tensor:
        """Rotate a layer's queries (T, H, head_dim), whose first row is at position `start`."""
        angles = self.angles(start, start + len(q))
        return self.apply(angles.scaled(q), angles, layer)

    def keys(self, k: Tensor, start: int, layer: int) -> Tensor:
        """Rotate a layer's keys (T, H, head_dim), whose first row is at position `start`."""
        return self.apply(k, self.angles(start, start + len(k)), layer)

    def angles(self, start: int, end: int) -> Angles:
        """Return the rows of the tables from position `start` to `end`, as views."""
        if end > self.length:
            raise ValueError(
                f"position {end - 1} is past the rotary table of {self.length} positions"
            )
        scale = None if self.query_scale is None else self.query_scale[start:end]
        return Angles(self.cos[start:end], self.sin[start:end], scale)

    def apply(self, x: Tensor, angles: Angles, layer: int) -> Tensor:
        """Rotate a layer's x (T, H, head_dim) by the angles of its rows."""
        return x if layer in self.nope_layers else rotate(x, angles.cos, angles.sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D dimensions of x (T, H, head_dim) by tables (T, 1, D) of a Rotary."""
    rotary_part = x[..., : cos.shape[-1]]
    rest = x[..., cos.shape[-1] :]
    first, second = _halves(rotary_part)
    rotated = torch.addcmul(rotary_part * cos, torch.cat((second, first), dim=-1), sin)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of the last dimension, as views."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
