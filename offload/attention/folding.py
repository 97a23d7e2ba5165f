"""Shared by all attention kernels: merging, and folding of grouped heads and causality.

Operators support neither GQA nor bottom-right causality; both are folded into calls without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from offload.self_test import Kernels, run_self_test

_SHAPE = 5, 6  # rows and heads of the self-test
_TOLERANCE = 2e-2  # 16 bits round the result

# out (T, Hq, D) in q's dtype, lse (T, Hq) float32, natural logarithm
Partial = tuple[Tensor, Tensor]
# q (T, Hq, D), k and v (N, Hkv, D), causal
Kernel = Callable[[Tensor, Tensor, Tensor, bool], Partial]
# q, k, v (1, H, T or N, D), causal, and for some a mask -> out (1, H, T, D), lse (1, H, T)
Operator = Callable[..., Partial]


@dataclass(frozen=True)
class Backend:
    """The attention kernels of one device and dtype."""

    attend: Kernel
    masked: Operator  # with a mask (1, 1, T, N) that is added to the scores


def empty_partial(q: Tensor) -> Partial:
    """Return the attention of q (T, Hq, D) over no keys."""
    return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)


def merge(parts: list[Partial]) -> Partial:
    """Combine attention over disjoint sets of keys, exactly.

    An empty part has out = 0 and lse = -inf. Source: the online softmax (Milakov &
    Gimelshein 2018), as used for split KV in FlashAttention-2, section 3.1.
    """
    if len(parts) == 1:
        return parts[0]
    if len(parts) > 2:
        return merge_stacked(parts)
    first, (out, lse) = parts
    if lse.is_cuda and out.dim() == 3:  # an operator's parts have a batch
        kernels, _ = merge_kernels(lse.device.type, out.dtype, out.shape[-1])
        if kernels is not None:
            merged: Partial = kernels.merge_parts(out[None], lse[None], first)
            return merged
    return _merge_two(*parts)


def merge_stacked(parts: list[Partial]) -> Partial:
    """Merge any number of parts as `merge`, so that a row's result depends on that row alone."""
    part_outs, part_lses = zip(*parts, strict=True)
    outs = torch.stack(part_outs)
    lses = torch.stack(part_lses)
    total = lses.logsumexp(0)  # (T, Hq)
    # (P, T, Hq); NaN where every part is empty
    weights = (lses - total).exp().nan_to_num(0)
    merged = (weights[..., None] * outs.float()).sum(0)
    return merged.to(outs.dtype), total


@cache
def merge_kernels(device: str, dtype: torch.dtype, dim: int) -> Kernels:
    """Return `offload.attention.merge_kernel` if it can be used, or None, and the reason.

    Args:
        device: type of the device.
        dtype: of the attention.
        dim: head dimension.
    """
    return run_self_test("offload.attention.merge_kernel", _test_merge, device, dtype, dim)


def _test_merge(kernels: ModuleType, device: torch.device, dtype: torch.dtype, dim: int) -> None:
    """Raise RuntimeError if the kernel's results differ from those of plain operations."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for empty in range(3):  # a row of each part is empty, and one of all
        out = torch.randn(_SHAPE[1], _SHAPE[0], dim, generator=generator).transpose(0, 1)
        lse = torch.randn(_SHAPE, generator=generator) * 3
        out[[empty, -1]], lse[[empty, -1]] = 0, -torch.inf
        parts.append((out.to(device, dtype), lse.to(device)))
    outs, lses = (torch.stack(each) for each in zip(*parts[1:], strict=True))
    actual = kernels.merge_parts(outs, lses, parts[0])
    for found, expected in zip(actual, merge_stacked(parts), strict=True):
        # a log-sum-exp is infinite where all parts are empty
        if not torch.allclose(found.float(), expected.float(), rtol=0, atol=_TOLERANCE):
            raise RuntimeError(f"merged attention in {dtype} is wrong")


def _merge_two(first: Partial, second: Partial) -> Partial:
    """Merge two parts in half as many operations, each of which is a launch on a GPU."""
    (out, lse), (other, other_lse) = first, second
    share = (lse - other_lse).sigmoid_().nan_to_num_(0)  # NaN where both parts are empty
    merged = torch.lerp(other.float(), out.float(), share[..., None])
    return merged.to(out.dtype), torch.logaddexp(lse, other_lse)


def concatenated(parts: Sequence[Partial], dim: int) -> Partial:
    """Return the attention of all rows (dim 0), or of all heads (dim 1), from that of some each."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim), torch.cat(lses, dim)


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Return a mask for `attend_masked` that is causal, with bottom-right alignment."""
    rows, keys = len(q), len(k)
    mask = torch.full((rows, keys), -torch.inf, device=q.device)
    mask.triu_(keys - rows + 1)
    return mask.repeat_interleave(q.shape[1] // k.shape[1], 0)


def attend_masked(op: Operator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Partial:
    """Attend in one call with mask (T * G, N), G query heads per KV head."""
    partial = op(_fold(q, k), _as_batch(k), _as_batch(v), False, mask[None, None])
    return _unfold(partial, q)


def attend_gqa(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attend with grouped heads and bottom-right causality, with an operator that has neither.

    The query heads of a KV head become rows of it. A causal segment splits into a prefix that
    every row sees and a square, where top-left and bottom-right alignment agree.
    """
    if not causal:
        return _unfold(op(_fold(q, k), _as_batch(k), _as_batch(v), False), q)
    prefix = len(k) - len(q)
    if prefix > 0:
        before = attend_gqa(op, q, k[:prefix], v[:prefix], False)
        square = attend_gqa(op, q, k[prefix:], v[prefix:], True)
        return merge([before, square])
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)  # (T, Hq, D); the square is small
    v = v.repeat_interleave(groups, 1)
    out, lse = op(_as_batch(q), _as_batch(k), _as_batch(v), True)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _as_batch(x: Tensor) -> Tensor:
    """Return x (N, H, D) in the operators' layout (1, H, N, D)."""
    return x.transpose(0, 1)[None]


def _fold(q: Tensor, k: Tensor) -> Tensor:
    """Return q (T, Hq, D) with the query heads of a KV head as rows of it (1, Hkv, T * G, D)."""
    by_head = q.unflatten(1, (k.shape[1], -1))  # (T, Hkv, G, D)
    if len(q) == 1:
        return by_head
    return by_head.transpose(0, 1).flatten(1, 2)[None]


def _unfold(partial: Partial, q: Tensor) -> Partial:
    """Return the attention of folded rows as that of q (T, Hq, D)."""
    rows = len(q)
    out, lse = partial
    if rows > 1:  # (1, Hkv, T * G, ...) to (T, Hkv, G, ...)
        out, lse = (x[0].unflatten(1, (rows, -1)).transpose(0, 1) for x in partial)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])
