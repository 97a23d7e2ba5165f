"""Tables for rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Caches apply them, for positions belong to caches.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """cos and sin for positions 0 to length - 1.

    They are computed in float32 and kept in the model's dtype, as transformers does.
    """

    def __init__(
        self, inv_freq: Tensor, scale: float, length: int, dtype: torch.dtype, device: torch.device
    ):
        """Compute the tables.

        `inv_freq` is (D / 2,) float32; `scale` multiplies cos and sin (YaRN's attention factor).
        """
        positions = torch.arange(length, dtype=torch.float32, device=device)
        inv_freq = inv_freq.to(device)
        angles = positions[:, None] * inv_freq  # (length, D / 2)
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles[:, None]  # (length, 1, D)
        cos = angles.cos()
        cos = cos * scale
        sin = angles.sin()
        sin = sin * scale
        self.cos = cos.to(dtype)
        sin = sin.to(dtype)
        # the sign of rotate_half, applied once
        first, second = _halves(sin)
        self.sin = torch.cat((-first, second), dim=-1)

    @property
    def length(self) -> int:
        return len(self.cos)

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """Rotate x (T, H, D), whose first row is at position `start`."""
        end = start + len(x)
        if end > self.length:
            raise ValueError(
                f"position {end - 1} is past the rotary table of {self.length} positions"
            )
        cos = self.cos[start:end]
        sin = self.sin[start:end]
        return rotate(x, cos, sin)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (T, 1, D) for `rotate`, for rows at positions (T,) of the table."""
        cos = self.cos[positions]
        sin = self.sin[positions]
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (T, H, D) by tables (T, 1, D) of a Rotary."""
    first, second = _halves(x)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves of the last dimension, as views."""
    half = x.shape[-1] // 2
    first = x[..., :half]
    second = x[..., half:]
    return first, second
