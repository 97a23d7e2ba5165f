"""Tangent summaries: one key, one value and one bias stand for a chunk of keys that is not there
(docs/algorithm.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.layout import ceil_div
from offload.selection import Seen

_TINY = torch.finfo(torch.float32).tiny


def _chunks(seen: Seen, size: int) -> Tensor:
    """What the rows give each key, by chunks of `size` tokens, the last one filled up with nothing:
    (Hkv, R, M, S).
    """
    weights = seen.weights
    if missing := -weights.shape[-1] % size:  # a pad of nothing would copy them
        weights = F.pad(weights, (0, missing))
    return weights.unflatten(-1, (-1, size))


def tangents(seen: Seen, kv: Tensor, size: int, part: slice = slice(None)) -> Tensor:
    """Keys k' and values v' (2, Hkv, m, D) that stand for some of the M = ceil(N / size) chunks of
    the prefix kv (2, Hkv, N, D), all by default, without the tokens that `seen` leaves out.

    With weights w_t that are the mean over rows of the softmax within the chunk, k' = sum_t w_t k_t
    and v' = sum_t w_t v_t. A chunk that is left out whole, or that no row gives any weight, gets
    the mean of its keys and values.
    """
    _, heads, tokens, dim = kv.shape
    chunks = _chunks(seen, size)[:, :, part]  # (Hkv, R, m, S)
    total = chunks.sum(-1, keepdim=True)  # (Hkv, R, m, 1)
    # (Hkv, m, 1): a row whose weights underflow has nothing to say of a chunk
    rows = (total > 0).sum(1)
    w = (chunks / total.clamp(min=_TINY)).sum(1) / rows.clamp(min=1)
    w = torch.where(rows > 0, w, 1 / size).to(kv.dtype).flatten(1)  # (Hkv, m * S)
    # a sum of weighted rows for each chunk, head by head: a view of a slot cannot be flattened, and
    # a product would copy it
    every = (
        torch.arange(ceil_div(tokens, size) * size, device=kv.device)
        .clamp(max=tokens - 1)
        .view(-1, size)[part]
        .flatten()
    )
    first = torch.arange(0, len(every), size, device=kv.device)
    means = [
        F.embedding_bag(every, x[h], first, mode="sum", per_sample_weights=w[h])
        for x in kv
        for h in range(heads)
    ]
    return torch.stack(means).view(2, heads, -1, dim)


def biases(seen: Seen, keys: Tensor, size: int) -> Tensor:
    """What a later query q must add to q . k' for keys k' (Hkv, M, D) to weigh what the M chunks
    weigh: (Hkv, M) float32.

    b = mean_i (log sum_t exp(q_i . k_t) - q_i . k'), which makes q . k' + b the first-order
    expansion of the logarithm of a chunk's mass around the rows q_i where k' is that chunk's
    tangent, and the right mass there for any other k'. -inf for a chunk that is left out whole, or
    that no row gives any weight.
    """
    total = _chunks(seen, size).sum(-1)  # (Hkv, R, M)
    mass = total.log() + seen.most[..., None] - seen.q.float() @ keys.float().transpose(1, 2)
    rows = total > 0
    bias = torch.where(rows, mass, 0.0).sum(1) / rows.sum(1).clamp(min=1)
    return bias.masked_fill(~rows.any(1), -torch.inf)
