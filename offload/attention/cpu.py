"""Attention on a CPU: torch's own flash operator, and where it wants help."""

from __future__ import annotations

import math
import time
from functools import cache

import torch
from torch import Tensor

from offload.attention.folding import Partial, attend_folded, attend_masked, merge
from offload.layout import ceil_div

_CPU_ROWS, _CPU_KEYS = 32, 512  # torch's CPU operator works through so many rows and keys at a time
# up to so many scores a head, one masked call beats a prefix, a square and their merge
_SMALL_MASK = 1 << 16


def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """torch's own CPU flash operator: float32 accumulation whatever the dtype. Not for float16,
    which it hardly supports.
    """
    if causal and len(q) * len(k) <= _SMALL_MASK:
        return attend_masked(cpu_op, q, k, v, True, None)
    return attend_folded(cpu_op, q, k, v, causal)


def cpu_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Partial:
    rows = q.shape[2]
    lone = (
        rows % _CPU_ROWS == 1
        and q.dtype != torch.float32
        and not causal
        and (mask is None or mask.shape[2] == 1)
    )
    if lone and _two_rows_are_faster(q.dtype):
        q = torch.cat((q, q[:, :, -1:]), dim=2)
    if causal or mask is not None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask
        )
    else:
        out, lse = _split(q, k, v)
    return out[:, :, :rows], lse[:, :, :rows]


@cache
def _two_rows_are_faster(dtype: torch.dtype) -> bool:
    """Than one 16-bit row, which takes a path of its own: half as fast as two on AMD's Zen 5, twice
    as fast on Sapphire Rapids.
    """
    kv = torch.ones(1, 2, 8 * _CPU_KEYS, 64, dtype=dtype)

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            kv[:, :, :rows], kv, kv, 0.0, False
        )
        return time.perf_counter() - started

    times = [(seconds(2), seconds(1)) for _ in range(6)][1:]
    return min(two for two, _ in times) < min(one for _, one in times)


def _split(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """The operator shares out heads and blocks of rows over the threads: where those are few, the
    keys are split as well.
    """
    heads, keys, threads = k.shape[1], k.shape[2], torch.get_num_threads()
    blocks = ceil_div(q.shape[2], _CPU_ROWS)
    parts = threads // math.gcd(threads, heads)  # by heads alone: the last block may be a small one
    # shared out evenly enough, or too little to share
    if heads * blocks >= 4 * threads or keys < parts * _CPU_KEYS:
        parts = 1
    size = keys // parts

    def over(k: Tensor, v: Tensor, parts: int) -> list[Partial]:
        k, v = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v))  # (P, H, N / P, D)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.expand(parts, -1, -1, -1), k, v, 0.0, False
        )
        return [(out[part, None], lse[part, None]) for part in range(parts)]

    whole = size * parts
    found = over(k[:, :, :whole], v[:, :, :whole], parts)
    if whole < keys:
        found += over(k[:, :, whole:], v[:, :, whole:], 1)
    return merge(found)
