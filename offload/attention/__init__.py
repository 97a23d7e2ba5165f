"""Exact attention over any split of the KV: partial results carry their log-sum-exp and merge by
it.

The one seam for attention kernels. Layout at the boundary: q (T, Hq, D), k and v (N, Hkv, D), out
(T, Hq, D), lse (T, Hq). `causal` means that the last T keys are the T queries' own tokens
(bottom-right alignment, as in flash-attn), so a caller may hand over a prefix and its new tokens as
one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from offload.attention.cpu import cpu_kernel, cpu_op
from offload.attention.cuda import cuda_flash, cuda_float32, flash_attn_kernel, matmul_op
from offload.attention.folding import Partial, attend_masked, attend_with_mask

Kernel = Callable[[Tensor, Tensor, Tensor, bool], Partial]


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None
) -> Partial:
    """softmax(q k^T / sqrt(D) + bias) v over these keys, with its log-sum-exp.

    q (T, Hq, D); k, v (N, Hkv, D) of the same dtype, Hq a multiple of Hkv; N >= T if causal. bias
    (Hkv, N) float32 is a weight per key, in logarithms; -inf leaves a key out. It is meant for few
    rows, and at least one key of a row must be left in.
    """
    rows, heads, _ = q.shape
    if len(k) == 0:
        return torch.zeros_like(q), q.new_full((rows, heads), -torch.inf, dtype=torch.float32)
    causal = causal and rows > 1
    if bias is not None:
        return attend_masked(cpu_op if q.device.type == "cpu" else matmul_op, q, k, v, causal, bias)
    return _kernel(q.device.type, q.dtype)(q, k, v, causal)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    """`partial_attention` of few rows, with what is added to their scores given whole: mask (Hkv or
    1, T, N) float32.
    """
    op = cpu_op if q.device.type == "cpu" else matmul_op
    return attend_with_mask(op, q, k, v, mask.repeat_interleave(q.shape[1] // k.shape[1], 1))


@cache
def _kernel(device: str, dtype: torch.dtype) -> Kernel:
    if device == "cpu":
        return cpu_kernel
    if dtype == torch.float32:
        return cuda_float32
    try:
        from flash_attn import flash_attn_func  # noqa: F401
    except (ImportError, OSError):  # not there, or built for another torch
        return cuda_flash
    return flash_attn_kernel
