"""Exact attention over any split of the KV: partial results are merged by their log-sum-exp.

All attention kernels are called from here. Layout at the interface: q (T, Hq, D), k and v
(N, Hkv, D), out (T, Hq, D), lse (T, Hq). `causal` means that the last T keys are the T queries' own
tokens (bottom-right alignment, as in flash-attn): a prefix and its new tokens may be one segment.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from offload.attention.cpu import CPU
from offload.attention.cuda import cuda_backend
from offload.attention.folding import Backend, Partial, attend_masked, empty_partial


def partial_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Return softmax(q k^T / sqrt(D)) v over these keys, with its log-sum-exp.

    Args:
        q: (T, Hq, D), Hq a multiple of Hkv.
        k: (N, Hkv, D), in q's dtype; N >= T if causal.
        v: (N, Hkv, D).
        causal: whether the last T keys are those of the queries' tokens.
    """
    if len(k) == 0:
        return empty_partial(q)
    causal = causal and len(q) > 1
    return backend(q.device.type, q.dtype).attend(q, k, v, causal)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    """Return `partial_attention` of few rows, with a mask (T, N) float32 added to the scores."""
    masked = backend(q.device.type, q.dtype).masked
    return attend_masked(masked, q, k, v, mask.repeat_interleave(q.shape[1] // k.shape[1], 0))


@cache
def backend(device: str, dtype: torch.dtype) -> Backend:
    """Return the attention kernels for a type of device and a dtype."""
    return CPU if device == "cpu" else cuda_backend(dtype)
