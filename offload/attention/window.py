"""Attention to a sliding window, by kernels that know none: the lower bound is a mask or a flip."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from offload.attention import masked_attention, partial_attention
from offload.attention.folding import Partial, concatenated, merge
from offload.attention.head_major import attend_prefix, token_slice
from offload.layout import MASKED_SCORES
from offload.traffic import ByteCounters


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Partial:
    """Return the attention of the last T of N tokens, each to its window.

    Args:
        q: (T, Hq, D), Hq a multiple of Hkv.
        k: (N, Hkv, D), in q's dtype; at least those in the window of any query.
        v: (N, Hkv, D).
        window: number of tokens that each query sees, its own the last of them.
    """
    rows = len(q)
    unseen = max(0, len(k) - rows - window + 1)
    k, v = k[unseen:], v[unseen:]
    keys = len(k)
    if keys <= window:
        return partial_attention(q, k, v, causal=True)
    if rows * keys <= MASKED_SCORES:
        return masked_attention(q, k, v, _mask(rows, keys, window, q.device))
    prefix = keys - rows
    whole = window - prefix  # rows that see all keys up to their own, at least one
    parts = [partial_attention(q[:whole], k[:window], v[:window], causal=True)]
    for start in range(whole, rows, window):
        own = q[start : start + window]
        end = prefix + start + len(own)
        first = end - window  # all rows of the block see the keys from here up to their own
        recent = partial_attention(own, k[first:end], v[first:end], causal=True)
        if len(own) > 1:
            recent = _with_older(own, k, v, first, recent)
        parts.append(recent)
    return concatenated(parts, dim=0)


def attend_slots(
    kv: Tensor, q: Tensor, tokens: int, traffic: ByteCounters, window: int | None
) -> Partial:
    """Return the attention of q (T, Hq, D) over a buffer's first tokens; count its bytes.

    The last T tokens of kv (2, Hkv, capacity, D) are those of the queries; `window` None: each sees
    all up to its own.
    """
    if window is None:
        return attend_prefix(kv, q, tokens, traffic)
    first = max(0, tokens - len(q) - window + 1)
    k, v = token_slice(kv, first, tokens).transpose(1, 2)
    traffic.attended += 2 * k.nbytes
    return windowed_attention(q, k, v, window)


def _with_older(q: Tensor, k: Tensor, v: Tensor, end: int, recent: Partial) -> Partial:
    """Merge the attention of a block of T rows to the T - 1 keys before `end` into `recent`.

    The first row sees all of them, every later row one less, from the other end: in reverse order
    of rows and keys that is causal attention.
    """
    count = len(q) - 1
    older = slice(end - count, end)
    reverse = [x.flip(0) for x in (q[:count], k[older], v[older])]
    out, lse = (x.flip(0) for x in partial_attention(reverse[0], reverse[1], reverse[2], True))
    merged = merge([(recent[0][:count], recent[1][:count]), (out, lse)])
    return torch.cat((merged[0], recent[0][count:])), torch.cat((merged[1], recent[1][count:]))


@lru_cache(maxsize=32)
def _mask(rows: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return the mask (rows, keys) float32 of the last rows of so many keys."""
    with torch.inference_mode(False):
        mask = torch.full((rows, keys), -torch.inf, device=device)
        own = keys - rows  # the first row's own key
        return torch.triu(mask, own + 1) + torch.tril(mask, own - window)
