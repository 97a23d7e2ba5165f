"""Attention on a CPU: torch's own flash operator, and where it wants help."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.attention.folding import Backend, Partial, attend_causal, attend_gqa, merge
from offload.attention.shape_buckets import ROWS, compiles_per_shape, pad_rows
from offload.layout import ceil_div

# torch's operator works through so many rows and keys at a time
_ROWS_PER_BLOCK, _KEYS_PER_BLOCK = 32, 512
# up to so many scores a head, one masked call beats a prefix, a square and their merge
_SMALL_MASK = 1 << 16


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend with torch's flash operator: float32 accumulation whatever the dtype.

    Takes what `offload.attention.partial_attention` takes.
    """
    if not compiles_per_shape(q, ROWS):
        return _attend(q, k, v, causal)
    filled = pad_rows(q)
    parts = []
    prefix = len(k) - len(q) if causal else len(k)
    if prefix:
        parts.append(_attend(filled, k[:prefix], v[:prefix], False))
    if causal:  # what is filled up stands behind all rows, which do not see it
        parts.append(_attend(filled, pad_rows(k[prefix:]), pad_rows(v[prefix:]), True))
    out, lse = merge(parts)
    return out[: len(q)], lse[: len(q)]


def op(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Partial:
    """Call torch's flash operator on q, k and v (1, H, T or N, D), as a `folding.Operator`."""
    if causal or mask is not None:
        return _flash(q, k, v, causal, mask)
    return _attend_split(q, k, v)


CPU = Backend(attend, op)  # not for float16, which torch's operator hardly supports


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    scores = len(q) * len(k)  # of a head
    if causal and scores <= _SMALL_MASK:
        return attend_causal(op, q, k, v)
    return attend_gqa(op, q, k, v, causal)


def _attend_split(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Split the keys over threads that the operator would leave idle.

    It shares out heads and blocks of rows over the threads; here there may be fewer heads.
    """
    _, heads, keys, _ = k.shape
    threads = torch.get_num_threads()
    blocks = ceil_div(q.shape[2], _ROWS_PER_BLOCK)
    parts = threads // math.gcd(threads, heads)  # by heads alone: the last block may be a small one
    busy = heads >= threads or heads * blocks >= 4 * threads
    if busy or keys < parts * _KEYS_PER_BLOCK:
        parts = 1
    whole = keys // parts * parts  # the rest is left over when all parts have one size
    partials = _attend_parts(q, k[:, :, :whole], v[:, :, :whole], parts)
    if whole < keys:
        partials += _attend_parts(q, k[:, :, whole:], v[:, :, whole:], 1)
    return merge(partials)


def _attend_parts(q: Tensor, k: Tensor, v: Tensor, parts: int) -> list[Partial]:
    """Attend to `parts` parts of the keys, all of one size."""

    def part_by_part(x: Tensor) -> Tensor:  # (1, H, N, D) to (P, H, N / P, D)
        return x[0].unflatten(1, (parts, -1)).transpose(0, 1)

    out, lse = _flash(q.expand(parts, -1, -1, -1), part_by_part(k), part_by_part(v))
    return [(out[part, None], lse[part, None]) for part in range(parts)]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
) -> Partial:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
