"""Tables for rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Caches apply them, for positions belong to caches.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cos and sin (T, 1, D) of a Rotary


class Rotary:
    """cos and sin for positions 0 to length - 1, and the layers that go without.

    D is the dimensions that turn: all of a head's, or the first of them. The tables are computed in
    float32 and kept in the model's dtype, as transformers does.
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
        `nope_layers` layers have no position embedding.
        """
        self.unrotated = frozenset(nope_layers)
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq.to(device)  # (length, D / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # (length, 1, D)
        self.cos = (angles.cos() * scale).to(dtype)
        # the sign of rotate_half, applied once
        first, second = _halves((angles.sin() * scale).to(dtype))
        self.sin = torch.cat((-first, second), dim=-1)

    @property
    def length(self) -> int:
        return len(self.cos)

    def __call__(self, x: Tensor, start: int, layer: int) -> Tensor:
        """Rotate a layer's x (T, H, head_dim), whose first row is at position `start`."""
        end = start + len(x)
        if end > self.length:
            raise ValueError(
                f"position {end - 1} is past the rotary table of {self.length} positions"
            )
        return self.apply(x, (self.cos[start:end], self.sin[start:end]), layer)

    def at(self, positions: Tensor) -> Angles:
        """Return the angles for rows at positions (T,) of the table."""
        return self.cos[positions], self.sin[positions]

    def apply(self, x: Tensor, angles: Angles, layer: int) -> Tensor:
        """Rotate a layer's x (T, H, head_dim) by the angles of its rows."""
        return x if layer in self.unrotated else rotate(x, *angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D dimensions of x (T, H, head_dim) by tables (T, 1, D) of a Rotary."""
    turning = x[..., : cos.shape[-1]]
    rest = x[..., cos.shape[-1] :]
    first, second = _halves(turning)
    turned = torch.addcmul(turning * cos, torch.cat((second, first), dim=-1), sin)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of the last dimension, as views."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
