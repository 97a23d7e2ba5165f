"""What all attention kernels share: merging, and plain calls for what an operator does not know.

Operators know neither grouped heads nor bottom-right causality: here these are folded into calls
without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# out (T, Hq, D) in q's dtype, lse (T, Hq) float32, natural logarithm
Partial = tuple[Tensor, Tensor]
# q (T, Hq, D), k and v (N, Hkv, D), causal
Kernel = Callable[[Tensor, Tensor, Tensor, bool], Partial]
# q, k, v (1, H, T or N, D), causal, and for some a mask; out (1, H, T, D), lse (1, H, T)
Operator = Callable[..., Partial]


@dataclass(frozen=True)
class Backend:
    """The attention kernels of one device and dtype."""

    attend: Kernel
    masked: Operator  # takes a mask (1, 1, T, N) that is added to the scores


def merge(parts: list[Partial]) -> Partial:
    """Combine attention over disjoint sets of keys, exactly.

    A part that saw no key has out = 0 and lse = -inf. Source: the online softmax (Milakov &
    Gimelshein 2018), as used for split KV in FlashAttention-2, section 3.1.
    """
    if len(parts) == 1:
        return parts[0]
    part_outs, part_lses = zip(*parts, strict=True)
    outs = torch.stack(part_outs)
    lses = torch.stack(part_lses)
    total = lses.logsumexp(0)  # (T, Hq)
    weights = lses - total  # (P, T, Hq)
    weights = weights.exp()
    weights = weights.nan_to_num(0)  # where every part is empty
    weighted = weights[..., None] * outs.float()
    merged = weighted.sum(0)
    merged = merged.to(outs.dtype)
    return merged, total


def attend_causally(op: Operator, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Attend in one call, with bottom-right causality in its mask."""
    rows, keys = len(q), len(k)
    mask = torch.full((rows, keys), -torch.inf, device=q.device)
    mask.triu_(keys - rows + 1)
    mask = mask.repeat_interleave(q.shape[1] // k.shape[1], 0)
    return attend_with_mask(op, q, k, v, mask)


def attend_with_mask(op: Operator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    """Attend in one call with mask (T * G, N), G query heads to a KV head."""
    groups = q.shape[1] // k.shape[1]
    keys = _as_batch(k)
    values = _as_batch(v)

    def attend(folded: Tensor) -> Partial:
        return op(folded, keys, values, False, mask[None, None])

    return _fold(q, groups, attend)


def attend_folded(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Serve grouped heads and bottom-right causality with an operator that has neither.

    Query heads of one KV head become rows of it. A causal segment splits into a prefix every row
    sees and a square, where top-left and bottom-right alignment agree.
    """
    groups = q.shape[1] // k.shape[1]
    if not causal:
        keys = _as_batch(k)
        values = _as_batch(v)

        def attend(folded: Tensor) -> Partial:
            return op(folded, keys, values, False)

        return _fold(q, groups, attend)
    prefix = len(k) - len(q)
    if prefix > 0:
        seen = attend_folded(op, q, k[:prefix], v[:prefix], False)
        own = attend_folded(op, q, k[prefix:], v[prefix:], True)
        return merge([seen, own])
    k = k.repeat_interleave(groups, 1)  # (T, Hq, D); a square is small
    v = v.repeat_interleave(groups, 1)
    rows = _as_batch(q)
    keys = _as_batch(k)
    values = _as_batch(v)
    out, lse = op(rows, keys, values, True)
    out = out[0].transpose(0, 1)
    lse = lse[0].transpose(0, 1)
    return out, lse


def _as_batch(x: Tensor) -> Tensor:
    """Return x (N, H, D) as operators take it: (1, H, N, D)."""
    return x.transpose(0, 1)[None]


def _fold(q: Tensor, groups: int, attend: Callable[[Tensor], Partial]) -> Partial:
    """Make query heads of one KV head rows of it, (1, Hkv, T * G, D), attend, and undo it."""
    rows, heads, dim = q.shape

    def unfold(x: Tensor) -> Tensor:  # (1, Hkv, T * G, ...) to (T, Hkv, G, ...)
        by_row = x[0].unflatten(1, (rows, groups))
        return by_row.transpose(0, 1)

    folded = q.unflatten(1, (-1, groups))  # (T, Hkv, G, D)
    folded = folded.permute(1, 0, 2, 3)
    folded = folded.flatten(1, 2)
    out, lse = attend(folded[None])
    out = unfold(out)
    out = out.reshape(rows, heads, dim)
    lse = unfold(lse)
    lse = lse.reshape(rows, heads)
    return out, lse
