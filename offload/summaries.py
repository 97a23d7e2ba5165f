"""Tangent summaries: one key, one value and one bias stand for a chunk of keys that is not there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.policy import Seen


def tangents(seen: Seen, kv: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Summarise the prefix kv (2, Hkv, N, D) in chunks of `size` tokens, the last one maybe shorter, without what `seen` leaves
    out.

    Returns summaries (2, Hkv, M, D) and bias (Hkv, M) float32, M = ceil(N / size), for a later query q to see a chunk as key k'
    with value v' and score q . k' + b: the first-order expansion of the logarithm of the chunk's mass around the rows q_i
    (docs/design.md, "Tangent summaries"). With weights w_t that are the mean over rows of the softmax within the chunk,

        k' = sum_t w_t k_t,  v' = sum_t w_t v_t,  b = mean_i (log sum_t exp(q_i . k_t) - q_i . k')

    A chunk that is left out whole, or that no row gives any weight, gets b = -inf.
    """
    _, heads, tokens, dim = kv.shape
    weights = F.pad(seen.weights, (0, -tokens % size)) if tokens % size else seen.weights
    chunks = weights.unflatten(-1, (-1, size))  # (Hkv, R, M, S)
    total = chunks.sum(-1)  # (Hkv, R, M)
    rows = (total > 0).float()  # a row whose weights underflow has nothing to say of a chunk
    share = rows / rows.sum(1, keepdim=True).clamp(min=1)
    w = (chunks * (share / total.clamp(min=torch.finfo(torch.float32).tiny))[..., None]).sum(1).to(kv.dtype)  # (Hkv, M, S)
    # a sum of weighted rows for each chunk, head by head: a view of a slot cannot be flattened, and a product would copy it
    every, first = torch.arange(tokens, device=kv.device), torch.arange(0, tokens, size, device=kv.device)
    means = [
        F.embedding_bag(every, x[head], first, mode="sum", per_sample_weights=w[head].flatten()[:tokens])
        for x in kv
        for head in range(heads)
    ]
    summary = torch.stack(means).view(2, heads, -1, dim)  # (2, Hkv, M, D)
    mass = total.log() + seen.most[..., None] - seen.q.float() @ summary[0].float().transpose(1, 2)  # (Hkv, R, M)
    bias = torch.where(rows > 0, mass * share, 0.0).sum(1)
    return summary, bias.masked_fill(rows.amax(1) == 0, -torch.inf)
