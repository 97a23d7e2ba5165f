"""Tangent summaries: one key, one value and one bias for a chunk of keys that is left out
(docs/algorithm.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.layout import ceil_div
from offload.selection import ObservedRows

_TINY = torch.finfo(torch.float32).tiny


def tangents(rows: ObservedRows, kv: Tensor, size: int, part: slice = slice(None)) -> Tensor:
    """Return keys k' and values v' (2, Hkv, m, D) that stand for chunks of the prefix.

    kv (2, Hkv, N, D) is the prefix, of M = ceil(N / size) chunks; `part` says which of them, all by
    default. Tokens that `rows` leaves out have no part in it.

    With weights w_t that are the mean over rows of the softmax within the chunk, k' = sum_t w_t k_t
    and v' = sum_t w_t v_t. A chunk that is left out whole, or that no row gives any weight, gets
    the mean of its keys and values.
    """
    _, heads, tokens, dim = kv.shape
    chunks = _by_chunk(rows.weights, size)
    chunks = chunks[:, :, part]  # (Hkv, R, m, S)
    total = chunks.sum(-1, keepdim=True)  # (Hkv, R, m, 1)
    # a row whose weights underflow has nothing to say of a chunk
    voices = (total > 0).sum(1)  # (Hkv, m, 1)
    total = total.clamp(min=_TINY)
    shares = chunks / total
    w = shares.sum(1)
    w = w / voices.clamp(min=1)
    w = torch.where(voices > 0, w, 1 / size)
    w = w.to(kv.dtype)
    w = w.flatten(1)  # (Hkv, m * S)
    # the last chunk is filled up with its last token
    filled = ceil_div(tokens, size) * size
    indices = torch.arange(filled, device=kv.device)
    indices = indices.clamp(max=tokens - 1)
    indices = indices.view(-1, size)
    indices = indices[part].flatten()
    first = torch.arange(0, len(indices), size, device=kv.device)

    def weighted_sums(x: Tensor, weights: Tensor) -> Tensor:
        return F.embedding_bag(indices, x, first, mode="sum", per_sample_weights=weights)

    # head by head: a view of a slot cannot be flattened, and a product would copy it
    means = []
    for x in kv:
        for head in range(heads):
            mean = weighted_sums(x[head], w[head])
            means.append(mean)
    stacked = torch.stack(means)
    return stacked.view(2, heads, -1, dim)


def biases(rows: ObservedRows, keys: Tensor, size: int) -> Tensor:
    """Return what a query q must add to q . k' to weigh what a chunk weighs: (Hkv, M) float32.

    keys k' (Hkv, M, D) stand for the M chunks. b = mean_i (log sum_t exp(q_i . k_t) - q_i . k').
    Where k' is its chunk's tangent, q . k' + b is the first-order expansion of the logarithm of the
    chunk's mass around the rows q_i; for any other k' it is the right mass at these rows. A chunk
    that is left out whole, or that no row gives any weight, has -inf.
    """
    total = _by_chunk(rows.weights, size).sum(-1)  # (Hkv, R, M)
    scores = rows.q.float() @ keys.float().transpose(1, 2)  # (Hkv, R, M)
    max_scores = rows.max_scores[..., None]
    mass = total.log()
    mass = mass + max_scores
    mass = mass - scores
    heard = total > 0
    voices = heard.sum(1)
    bias = torch.where(heard, mass, 0.0)
    bias = bias.sum(1)
    bias = bias / voices.clamp(min=1)
    unheard = ~heard.any(1)
    return bias.masked_fill(unheard, -torch.inf)


def _by_chunk(weights: Tensor, size: int) -> Tensor:
    """Return weights of keys (Hkv, R, N) by chunks of `size` keys (Hkv, R, M, S).

    The last chunk is filled up with keys of no weight.
    """
    missing = -weights.shape[-1] % size
    if missing:  # a pad of nothing would copy them
        weights = F.pad(weights, (0, missing))
    return weights.unflatten(-1, (-1, size))
