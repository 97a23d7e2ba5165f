"""Attention on a CPU: torch's flash operator, and workarounds for its limitations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offload.attention.folding import Backend, Partial, attend_causal, attend_gqa, merge
from offload.attention.shape_buckets import ROWS, compiles_per_shape, pad_rows
from offload.layout import ceil_div

# block sizes of torch's operator
_ROWS_PER_BLOCK, _KEYS_PER_BLOCK = 32, 512
# up to this number of scores per head, one masked call is faster than merging prefix and square
_SMALL_MASK = 1 << 16


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
    if causal or mask is not None:
        return _flash(q, k, v, causal, mask)
    return _attend_split(q, k, v)


CPU = Backend(attend, op)  # not used with float16: torch's operator barely supports it


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    scores = len(q) * len(k)  # scores per head
    if causal and scores <= _SMALL_MASK:
        return attend_causal(op, q, k, v)
    return attend_gqa(op, q, k, v, causal)


def _attend_split(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend with the keys split over threads that the operator would leave idle.

    The operator parallelises over heads and blocks of rows only, and there may be fewer of these.
    """
    _, heads, keys, _ = k.shape
    threads = torch.get_num_threads()
    blocks = ceil_div(q.shape[2], _ROWS_PER_BLOCK)
    parts = threads // math.gcd(threads, heads)  # from heads alone: the last block may be small
    busy = heads >= threads or heads * blocks >= 4 * threads
    if busy or keys < parts * _KEYS_PER_BLOCK:
        parts = 1
    whole = keys // parts * parts  # equal parts; the remaining keys are a part of their own
    partials = _attend_parts(q, k[:, :, :whole], v[:, :, :whole], parts)
    if whole < keys:
        partials += _attend_parts(q, k[:, :, whole:], v[:, :, whole:], 1)
    return merge(partials)


def _attend_parts(q: Tensor, k: Tensor, v: Tensor, parts: int) -> list[Partial]:
    """Attend to `parts` parts of the keys of equal size."""

    def split_keys(x: Tensor) -> Tensor:  # (1, H, N, D) to (P, H, N / P, D)
        return x[0].unflatten(1, (parts, -1)).transpose(0, 1)

    out, lse = _flash(q.expand(parts, -1, -1, -1), split_keys(k), split_keys(v))
    return [(out[part, None], lse[part, None]) for part in range(parts)]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
) -> Partial:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
