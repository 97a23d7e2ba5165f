"""What all attention kernels share: merging partial results, and grouped heads, causality and
biases folded into plain calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# out (T, Hq, D) in q's dtype, lse (T, Hq) float32, natural logarithm
Partial = tuple[Tensor, Tensor]
# q, k, v (1, H, T or N, D), causal, and for some a mask; out (1, H, T, D), lse (1, H, T)
Operator = Callable[..., Partial]


def merge(parts: list[Partial]) -> Partial:
    """Combine attention over disjoint sets of keys, exactly. A part that saw no key has out = 0 and
    lse = -inf.

    Source: the online softmax (Milakov & Gimelshein 2018), as used for split KV in
    FlashAttention-2, section 3.1.
    """
    if len(parts) == 1:
        return parts[0]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)  # (T, Hq)
    weights = (lses - total).exp().nan_to_num(0)  # (P, T, Hq); nan: every part is empty
    merged = (weights[..., None] * outs.float()).sum(0)
    return merged.to(outs.dtype), total


def attend_masked(
    op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None
) -> Partial:
    """One call, the bias and bottom-right causality in its mask (1, Hkv or 1, T * G or 1, N)."""
    rows, groups = len(q), q.shape[1] // k.shape[1]
    mask = q.new_zeros(1, len(k), dtype=torch.float32) if bias is None else bias
    mask = mask[:, None]
    if causal:
        later = (
            torch.full((rows, rows), -torch.inf, device=q.device)
            .triu_(1)
            .repeat_interleave(groups, 0)
        )
        mask = torch.cat(
            (mask[..., :-rows].expand(-1, rows * groups, -1), mask[..., -rows:] + later), dim=-1
        )
    return attend_with_mask(op, q, k, v, mask)


# mask (Hkv or 1, T * G or 1, N)
def attend_with_mask(op: Operator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return _fold(
        q, q.shape[1] // k.shape[1], lambda folded: op(folded, keys, values, False, mask[None])
    )


def attend_folded(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Serve grouped heads and bottom-right causality with an operator on (1, H, T, D) that has
    neither.

    Query heads of one KV head become rows of it. A causal segment splits into a prefix every row
    sees and a square, where top-left and bottom-right alignment agree.
    """
    rows, groups = len(q), q.shape[1] // k.shape[1]
    if not causal:
        return _fold(
            q,
            groups,
            lambda folded: op(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], False),
        )
    if (prefix := len(k) - rows) > 0:
        parts = [
            attend_folded(op, q, k[:prefix], v[:prefix], False),
            attend_folded(op, q, k[prefix:], v[prefix:], True),
        ]
        return merge(parts)
    # (T, Hq, D); a square is small
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out, lse = op(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], True)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _fold(q: Tensor, groups: int, attend: Callable[[Tensor], Partial]) -> Partial:
    """Query heads of one KV head as rows of it, (1, Hkv, T * G, D), there and back."""
    rows, heads, dim = q.shape
    out, lse = attend(q.unflatten(1, (-1, groups)).permute(1, 0, 2, 3).flatten(1, 2)[None])
    out = out[0].unflatten(1, (rows, groups)).transpose(0, 1).reshape(rows, heads, dim)
    return out, lse[0].unflatten(1, (rows, groups)).transpose(0, 1).reshape(rows, heads)
