"""Exact attention over any split of the KV: partial results carry their log-sum-exp and merge by it.

The one seam for attention kernels. Layout at the boundary: q (T, Hq, D), k and v (N, Hkv, D), out (T, Hq, D), lse (T, Hq).
`causal` means that the last T keys are the T queries' own tokens (bottom-right alignment, as in flash-attn), so a caller may
hand over a prefix and its new tokens as one segment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # out (T, Hq, D) in q's dtype, lse (T, Hq) float32, natural logarithm
Kernel = Callable[[Tensor, Tensor, Tensor, bool], Partial]
Operator = Callable[..., Partial]  # q, k, v (1, H, T or N, D), causal, and for some a mask; out (1, H, T, D), lse (1, H, T)

_CPU_ROWS, _CPU_KEYS = 32, 512  # torch's CPU operator works through so many rows and keys at a time
_SMALL_MASK = 1 << 16  # up to so many scores a head, one masked call beats a prefix, a square and their merge


def merge(parts: list[Partial]) -> Partial:
    """Combine attention over disjoint sets of keys, exactly. A part that saw no key has out = 0 and lse = -inf.

    Source: the online softmax (Milakov & Gimelshein 2018), as used for split KV in FlashAttention-2, section 3.1.
    """
    if len(parts) == 1:
        return parts[0]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)  # (T, Hq)
    weights = (lses - total).exp().nan_to_num(0)  # (P, T, Hq); nan: every part is empty
    merged = (weights[..., None] * outs.float()).sum(0)
    return merged.to(outs.dtype), total


def partial_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None) -> Partial:
    """softmax(q k^T / sqrt(D) + bias) v over these keys, with its log-sum-exp.

    q (T, Hq, D); k, v (N, Hkv, D) of the same dtype, Hq a multiple of Hkv; N >= T if causal. bias (Hkv, N) float32 is a weight
    per key, in logarithms; -inf leaves a key out. It is meant for few rows, and at least one key of a row must be left in.
    """
    rows, heads, _ = q.shape
    if len(k) == 0:
        return torch.zeros_like(q), q.new_full((rows, heads), -torch.inf, dtype=torch.float32)
    causal = causal and rows > 1
    if bias is not None:
        return _masked(_cpu_op if q.device.type == "cpu" else _matmul_op, q, k, v, causal, bias)
    return _kernel(q.device.type, q.dtype)(q, k, v, causal)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    """`partial_attention` of few rows, with what is added to their scores given whole: mask (Hkv or 1, T, N) float32."""
    op = _cpu_op if q.device.type == "cpu" else _matmul_op
    return _with_mask(op, q, k, v, mask.repeat_interleave(q.shape[1] // k.shape[1], 1))


@cache
def _kernel(device: str, dtype: torch.dtype) -> Kernel:
    if device == "cpu":
        return _cpu
    if dtype == torch.float32:
        return _cuda_float32
    try:
        from flash_attn import flash_attn_func  # noqa: F401
    except (ImportError, OSError):  # not there, or built for another torch
        return _cuda_flash
    return _flash_attn


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """torch's own CPU flash operator: float32 accumulation whatever the dtype. Not for float16, which it hardly supports."""
    if causal and len(q) * len(k) <= _SMALL_MASK:
        return _masked(_cpu_op, q, k, v, True, None)
    return _folded(_cpu_op, q, k, v, causal)


def _cpu_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Partial:
    rows = q.shape[2]
    lone = rows % _CPU_ROWS == 1 and q.dtype != torch.float32 and not causal and (mask is None or mask.shape[2] == 1)
    if lone and _two_rows_are_faster(q.dtype):
        q = torch.cat((q, q[:, :, -1:]), dim=2)
    if causal or mask is not None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    else:
        out, lse = _split(q, k, v)
    return out[:, :, :rows], lse[:, :, :rows]


@cache
def _two_rows_are_faster(dtype: torch.dtype) -> bool:
    """Than one 16-bit row, which takes a path of its own: half as fast as two on AMD's Zen 5, twice as fast on Sapphire Rapids."""
    kv = torch.ones(1, 2, 8 * _CPU_KEYS, 64, dtype=dtype)

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(kv[:, :, :rows], kv, kv, 0.0, False)
        return time.perf_counter() - started

    times = [(seconds(2), seconds(1)) for _ in range(6)][1:]
    return min(two for two, _ in times) < min(one for _, one in times)


def _split(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """The operator shares out heads and blocks of rows over the threads: where those are few, the keys are split as well."""
    heads, keys, threads = k.shape[1], k.shape[2], torch.get_num_threads()
    blocks = -(-q.shape[2] // _CPU_ROWS)
    parts = threads // math.gcd(threads, heads)  # by heads alone: the last block may be a small one
    if heads * blocks >= 4 * threads or keys < parts * _CPU_KEYS:  # shared out evenly enough, or too little to share
        parts = 1
    size = keys // parts

    def over(k: Tensor, v: Tensor, parts: int) -> list[Partial]:
        k, v = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v))  # (P, H, N / P, D)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.expand(parts, -1, -1, -1), k, v, 0.0, False)
        return [(out[part, None], lse[part, None]) for part in range(parts)]

    whole = size * parts
    found = over(k[:, :, :whole], v[:, :, :whole], parts)
    if whole < keys:
        found += over(k[:, :, whole:], v[:, :, whole:], 1)
    return merge(found)


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """torch's built-in FlashAttention-2, for 16-bit dtypes."""

    def op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]

    return _folded(op, q, k, v, causal)


def _cuda_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """torch's memory-efficient kernel: the flash kernels take no float32. Its lse is padded to a multiple of 32 rows."""

    def op(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse[..., : q.shape[2]]

    return _folded(op, q, k, v, causal)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """The flash-attn package: grouped heads and bottom-right causal masks are its own."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q[None], k[None], v[None], causal=causal, return_attn_probs=True)
    return out[0], lse[0].transpose(0, 1)  # lse (1, Hq, T)


def _matmul_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor) -> Partial:
    """Few rows with a bias, where no fused kernel takes one: matmul, softmax in float32, matmul."""
    keys = k[0].transpose(1, 2)  # (H, D, N)
    wide = q.dtype != torch.float32 and q.device.type == "cuda"  # other devices know no such product
    products = torch.bmm(q[0], keys, torch.float32) if wide else torch.bmm(q[0], keys).float()
    scores = products[None] * q.shape[-1] ** -0.5 + mask  # (1, H, T, N)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _masked(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> Partial:
    """One call, the bias and bottom-right causality in its mask (1, Hkv or 1, T * G or 1, N)."""
    rows, groups = len(q), q.shape[1] // k.shape[1]
    mask = q.new_zeros(1, len(k), dtype=torch.float32) if bias is None else bias
    mask = mask[:, None]
    if causal:
        later = torch.full((rows, rows), -torch.inf, device=q.device).triu_(1).repeat_interleave(groups, 0)
        mask = torch.cat((mask[..., :-rows].expand(-1, rows * groups, -1), mask[..., -rows:] + later), dim=-1)
    return _with_mask(op, q, k, v, mask)


def _with_mask(op: Operator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:  # mask (Hkv or 1, T * G or 1, N)
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return _fold(q, q.shape[1] // k.shape[1], lambda folded: op(folded, keys, values, False, mask[None]))


def _folded(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Serve grouped heads and bottom-right causality with an operator on (1, H, T, D) that has neither.

    Query heads of one KV head become rows of it. A causal segment splits into a prefix every row sees and a square, where
    top-left and bottom-right alignment agree.
    """
    rows, groups = len(q), q.shape[1] // k.shape[1]
    if not causal:
        return _fold(q, groups, lambda folded: op(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], False))
    if (prefix := len(k) - rows) > 0:
        parts = [_folded(op, q, k[:prefix], v[:prefix], False), _folded(op, q, k[prefix:], v[prefix:], True)]
        return merge(parts)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (T, Hq, D); a square is small
    out, lse = op(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], True)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _fold(q: Tensor, groups: int, attend: Callable[[Tensor], Partial]) -> Partial:
    """Query heads of one KV head as rows of it, (1, Hkv, T * G, D), there and back."""
    rows, heads, dim = q.shape
    out, lse = attend(q.unflatten(1, (-1, groups)).permute(1, 0, 2, 3).flatten(1, 2)[None])
    out = out[0].unflatten(1, (rows, groups)).transpose(0, 1).reshape(rows, heads, dim)
    return out, lse[0].unflatten(1, (rows, groups)).transpose(0, 1).reshape(rows, heads)
