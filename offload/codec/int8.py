"""Keys and values in 8 bits: an integer per element, and a scale per token and head.

A token's integers depend on that token alone, so they are the same whatever else is selected with
it. Source: per-token quantisation to the largest magnitude, as of activations in ZeroQuant (Yao et
al. 2022, arXiv 2206.01861, section 4.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127


def quantise(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise x (..., D) into codes (..., D) int8 and scales (..., 1) of x's dtype."""
    largest = x.abs().amax(-1, keepdim=True)
    limits = torch.finfo(x.dtype)
    # a subnormal scale would have few bits, or be zero; a code times the largest scale must not
    # overflow
    scale = largest.float() / _LARGEST
    scales.copy_(scale.clamp_(limits.tiny, limits.max / (_LARGEST + 1)))
    steps = x.float() * (1 / scales.float())  # divides by the scale as rounded to x's dtype
    steps.round_()
    steps.clamp_(-_LARGEST, _LARGEST)
    codes.copy_(steps)


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the elements of codes (..., D) and scales (..., 1) to out (..., D)."""
    if not codes.is_cpu:
        torch.mul(codes, scales, out=out)
        return
    out.copy_(codes)  # a CPU product of mixed dtypes would allocate a converted copy first
    out.mul_(scales)
