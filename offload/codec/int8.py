"""Keys and values in 8 bits: an integer per element, and a scale per token and head.

A token's integers depend on that token alone, so they are the same whatever else is selected with
it. Source: per-token quantisation to the largest magnitude, as of activations in ZeroQuant (Yao et
al. 2022, arXiv 2206.01861, section 4.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


def scale_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest scale of elements of a dtype.

    A subnormal scale would have few bits, or be zero; a code times the largest must not overflow.
    """
    limits = torch.finfo(dtype)
    return limits.tiny, limits.max / (LARGEST + 1)


def quantise(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise x (..., D) into codes (..., D) int8 and scales (..., 1) of x's dtype."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.float() / LARGEST
    scales.copy_(scale.clamp_(*scale_limits(x.dtype)))
    steps = x.float() * (1 / scales.float())  # divides by the scale as rounded to x's dtype
    steps.round_()
    steps.clamp_(-LARGEST, LARGEST)
    codes.copy_(steps)


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the elements of codes (..., D) and scales (..., 1) to out (..., D)."""
    if not codes.is_cpu:
        torch.mul(codes, scales, out=out)
        return
    out.copy_(codes)  # a CPU product of mixed dtypes would allocate a converted copy first
    out.mul_(scales)
