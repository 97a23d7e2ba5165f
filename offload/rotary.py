"""Rotary position embedding tables (Su et al. 2021, arXiv 2104.09864), applied by the caches:
positions belong to them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """cos and sin for positions 0..length-1, computed in float32 and kept in the model's dtype, as
    transformers does.

    `inv_freq` is (D / 2,) float32; `scale` multiplies cos and sin (YaRN's attention factor).
    """

    def __init__(
        self, inv_freq: Tensor, scale: float, length: int, dtype: torch.dtype, device: torch.device
    ):
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq.to(device)  # (length, D / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # (length, 1, D)
        self.cos = (angles.cos() * scale).to(dtype)
        sin = (angles.sin() * scale).to(dtype)
        half = inv_freq.numel()
        # the sign of rotate_half, applied once
        self.sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

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
        return rotate(x, self.cos[start:end], self.sin[start:end])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (T, 1, D) for `rotate`, for rows at positions (T,), none past the table."""
        return self.cos[positions], self.sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, H, D) by tables (T, 1, D) of a Rotary."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)
