"""Attention on a CPU: torch's flash operator, and workarounds for its limitations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.attention.folding import (
    Backend,
    Partial,
    attend_gqa,
    attend_masked,
    causal_mask,
    merge,
)
from offload.attention.shape_buckets import ROWS, compiles_per_shape, pad_rows
from offload.layout import ceil_div

# block sizes of torch's operator
_ROWS_PER_BLOCK, _KEYS_PER_BLOCK = 32, 512
# up to this number of scores per head, one masked call is faster than merging prefix and square
_SMALL_MASK = 1 << 16
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend with torch's flash operator, which accumulates in float32 for every dtype.

    The arguments are those of `offload.attention.partial_attention`.
    """
    if not compiles_per_shape(q, ROWS):
        return _attend(q, k, v, causal)
    padded = pad_rows(q)
    parts = []
    prefix = len(k) - len(q) if causal else len(k)
    if prefix:
        parts.append(_attend(padded, k[:prefix], v[:prefix], False))
    if causal:  # the padding follows all rows, so they do not see it
        parts.append(_attend(padded, pad_rows(k[prefix:]), pad_rows(v[prefix:]), True))
    out, lse = merge(parts)
    return out[: len(q)], lse[: len(q)]


def op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Partial:
    """Call torch's flash operator on q, k and v (1, H, T or N, D), as a `folding.Operator`."""
    keys = k.shape[2]
    parts = 1 if causal or mask is not None else _key_parts(q, k)
    if parts == 1:
        return _flash(q, k, v, 0.0, causal, attn_mask=mask)
    whole = keys // parts * parts  # equal parts; the remaining keys are a part of their own
    by_part = (_by_part(x[:, :, :whole], parts) for x in (k, v))
    out, lse = _flash(q.expand(parts, -1, -1, -1), *by_part)
    partials = [(out[part, None], lse[part, None]) for part in range(parts)]
    if whole < keys:
        partials.append(_flash(q, k[:, :, whole:], v[:, :, whole:]))
    return merge(partials)


CPU = Backend(attend, op)  # not used with float16: torch's operator barely supports it


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    scores = len(q) * len(k)  # scores per head
    if causal and scores <= _SMALL_MASK:
        return attend_masked(op, q, k, v, causal_mask(q, k))
    return attend_gqa(op, q, k, v, causal)


def _key_parts(q: Tensor, k: Tensor) -> int:
    """Return in how many parts to attend to the keys, so that no thread is idle.

    The operator parallelises over heads and blocks of rows only, and there may be fewer of these.
    """
    heads, threads = k.shape[1], torch.get_num_threads()
    blocks = ceil_div(q.shape[2], _ROWS_PER_BLOCK)
    parts = threads // math.gcd(threads, heads)  # from heads alone: the last block may be small
    busy = heads >= threads or heads * blocks >= 4 * threads
    return 1 if busy or k.shape[2] < parts * _KEYS_PER_BLOCK else parts


def _by_part(x: Tensor, parts: int) -> Tensor:
    """Return x (1, H, N, D) as (P, H, N / P, D)."""
    return x[0].unflatten(1, (parts, -1)).transpose(0, 1)
