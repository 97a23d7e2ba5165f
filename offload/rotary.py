"""Tables for rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Caches apply them, since positions are known to caches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

# up to this number of rows, queries and keys are rotated together: fewer operations, more memory
_FEW_ROWS = 64


class Angles(NamedTuple):
    """Rows of a Rotary's tables."""

    cos: Tensor  # (T, 1, D)
    sin: Tensor  # (T, 1, D)
    query_scale: Tensor | None = None  # (T, 1, 1)
    # those of layers with a window, if these have others
    windowed_cos: Tensor | None = None
    windowed_sin: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Angles:
        """Return the results of a function on each."""
        rest = (None if each is None else function(each) for each in self[2:])
        return Angles(function(self.cos), function(self.sin), *rest)

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
        self.tables = Angles(*_tables(inv_freq, scale, length, dtype, device))
        self._windowed_layers: frozenset[int] = frozenset()
        self._query_weights: Tensor | None = None
        # the last call of `angles`, and its result: all layers of a forward ask for the same
        self._last: tuple[Angles, int, int, Angles] | None = None

    def rotate_windowed(
        self, inv_freq: Tensor, scale: float, windowed_layers: Collection[int]
    ) -> None:
        """Rotate some layers by tables of their own; arguments as those of the others'."""
        self._windowed_layers = frozenset(windowed_layers)
        cos = self.tables.cos
        own = _tables(inv_freq, scale, self.length, cos.dtype, cos.device)
        self.tables = self.tables._replace(windowed_cos=own[0], windowed_sin=own[1])

    def scale_queries(self, beta: float, positions: int) -> None:
        """Scale the queries of each position, by 1 + beta log(1 + floor(position / positions))."""
        cos = self.tables.cos
        index = torch.arange(self.length, dtype=torch.float32, device=cos.device)
        scale = 1 + beta * torch.log(1 + torch.floor(index / positions))
        self.tables = self.tables._replace(query_scale=scale.to(cos.dtype)[:, None, None])

    def weight_queries(self, weights: Tensor) -> None:
        """Multiply the rotated queries of each layer by its weights (layers, head_dim)."""
        self._query_weights = weights

    def first(self, length: int) -> Rotary:
        """Return the tables of the first positions alone, in memory of their own."""
        rotary = copy(self)
        rotary.tables = self.angles(0, length).map(torch.clone)
        rotary._last = None  # it would keep the whole tables
        return rotary

    @property
    def length(self) -> int:
        return len(self.tables.cos)

    def queries_and_keys(
        self, q: Tensor, k: Tensor, start: int, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Rotate a layer's queries and keys (T, H, head_dim), whose first row is at `start`."""
        if len(q) > _FEW_ROWS:
            return self.queries(q, start, layer), self.keys(k, start, layer)
        angles = self.angles(start, start + len(q))
        both = torch.cat((angles.scaled(q), k), dim=1)
        heads = q.shape[1]
        rotated = self.apply(both, angles, layer)
        return self.weighted(rotated[:, :heads], layer), rotated[:, heads:]

    def queries(self, q: Tensor, start: int, layer: int) -> Tensor:
        """Rotate a layer's queries (T, H, head_dim), whose first row is at position `start`."""
        angles = self.angles(start, start + len(q))
        return self.weighted(self.apply(angles.scaled(q), angles, layer), layer)

    def keys(self, k: Tensor, start: int, layer: int) -> Tensor:
        """Rotate a layer's keys (T, H, head_dim), whose first row is at position `start`."""
        return self.apply(k, self.angles(start, start + len(k)), layer)

    def angles(self, start: int, end: int) -> Angles:
        """Return the rows of the tables from position `start` to `end`, as views."""
        if self._last is not None:
            tables, first, last, angles = self._last
            if tables is self.tables and (first, last) == (start, end):
                return angles
        if end > self.length:
            raise ValueError(
                f"position {end - 1} is past the rotary table of {self.length} positions"
            )
        angles = self.tables.map(lambda table: table[start:end])
        self._last = self.tables, start, end, angles
        return angles

    def apply(self, x: Tensor, angles: Angles, layer: int) -> Tensor:
        """Rotate a layer's x (T, H, head_dim) by the angles of its rows."""
        own = self.of_layer(angles, layer)
        return x if own is None else rotate(x, *own)

    def weighted(self, q: Tensor, layer: int) -> Tensor:
        """Return a layer's rotated queries (T, H, head_dim), multiplied by its weights if any."""
        return q if self._query_weights is None else q * self._query_weights[layer]

    def of_layer(self, angles: Angles, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin for a layer; None if it has no position embedding."""
        if layer in self.nope_layers:
            return None
        if layer in self._windowed_layers:
            assert angles.windowed_cos is not None
            assert angles.windowed_sin is not None
            return angles.windowed_cos, angles.windowed_sin
        return angles.cos, angles.sin


def _tables(
    inv_freq: Tensor, scale: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (length, 1, D), with the sign of rotate_half in sin."""
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq.to(device)  # (length, D / 2)
    angles = torch.cat((angles, angles), dim=-1)[:, None]  # (length, 1, D)
    first, second = _halves((angles.sin() * scale).to(dtype))
    return (angles.cos() * scale).to(dtype), torch.cat((-first, second), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D dimensions of x (T, H, head_dim) by tables (T, 1, D) of a Rotary."""
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat((rotate(x[..., :dims], cos, sin), x[..., dims:]), dim=-1)
    first, second = _halves(x)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of the last dimension, as views."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
