"""Keys and values in 8 bits: an integer for each element, and a scale for each token of a head.

A token's integers depend on that token alone, so they are the same whatever else is selected with
it. Source: per-token quantisation to the largest magnitude, as of activations in ZeroQuant (Yao et
al. 2022, arXiv 2206.01861, section 4.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127


def quantise(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write what stands for x (..., D) to codes (..., D) int8 and scales (..., 1) of x's dtype."""
    largest = x.abs().amax(-1, keepdim=True)
    numbers = torch.finfo(x.dtype)
    # a scale that is no normal number would have few bits, or be zero; a code times the largest
    # scale is a number still
    wanted = largest.float() / _LARGEST
    scales.copy_(wanted.clamp_(numbers.tiny, numbers.max / (_LARGEST + 1)))
    steps = x.float() * (1 / scales.float())  # by the scale as it is kept
    steps.round_()
    steps.clamp_(-_LARGEST, _LARGEST)
    codes.copy_(steps)


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write to out (..., D) what codes (..., D) and scales (..., 1) stand for."""
    if not codes.is_cpu:
        torch.mul(codes, scales, out=out)
        return
    out.copy_(codes)  # here a product of mixed dtypes would make a copy of its own first
    out.mul_(scales)
