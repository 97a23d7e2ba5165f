"""Which chunks of the context a retrieval cache keeps: policies behind one interface.

A policy sees what the target sees when it verifies: rows of queries, and all keys of the prefix
while they are on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.policies import POLICY_TRAITS, PolicyTraits


class ObservedRows:
    """Some rows of a pass against the prefix keys of a few KV heads.

    What is derived from them is computed once, when it is asked for.
    """

    def __init__(self, q: Tensor, keys: Tensor, count: int):
        """Keep `count` of the rows, evenly spaced, with the last.

        q (T, Hq, D) holds rotated queries, newest last, and keys (Hkv, N, D) are rotated. Grouped
        query heads share their KV head: their rows stand beside each other, R = count x group.
        """
        count = min(count, len(q))
        steps = torch.arange(1, count + 1, device=q.device)
        ends = steps * len(q) // count
        picked = q[ends - 1]
        by_head = picked.unflatten(1, (len(keys), -1))  # (count, Hkv, group, D)
        by_head = by_head.permute(1, 0, 2, 3)
        by_head = by_head.flatten(1, 2)  # (Hkv, R, D)
        scale = q.shape[-1] ** -0.5
        self.q = by_head * scale
        self.keys = keys

    @cached_property
    def _weights_and_max(self) -> tuple[Tensor, Tensor]:
        if self.keys.is_cpu and self.keys.dtype != torch.float32:
            # here a batch is slower than one head after another
            pairs = zip(self.q, self.keys, strict=True)
            scores = torch.stack([keys @ q.T for q, keys in pairs])
        else:
            rows = self.q.transpose(1, 2)
            scores = self.keys @ rows  # (Hkv, N, R): faster this way, on a CPU
        scores = scores.transpose(1, 2)
        scores = scores.float()
        scores = scores.contiguous()
        max_scores = scores.amax(-1, keepdim=True)
        scores.sub_(max_scores)
        scores.exp_()
        return scores, max_scores[..., 0]

    @property
    def weights(self) -> Tensor:
        """exp(q . k - max_scores), (Hkv, R, N) float32: 1 at a row's likeliest key."""
        return self._weights_and_max[0]

    @property
    def max_scores(self) -> Tensor:
        """The largest q . k of each row, (Hkv, R) float32."""
        return self._weights_and_max[1]

    @cached_property
    def mass(self) -> Tensor:
        """Attention that each key gets from all rows together, (Hkv, N) float32.

        A row has 1 to give.
        """
        shares = self.weights.sum(-1).reciprocal()  # (Hkv, R)
        mass = shares[:, None] @ self.weights  # (Hkv, 1, N)
        return mass[:, 0]

    def leave_out(self, chunks: Tensor, size: int) -> None:
        """Let the tokens of these chunks (Hkv, n) of `size` tokens weigh nothing from now on."""
        whole = self.keys.shape[1] // size * size
        weights = self.weights[..., :whole]
        by_chunk = weights.unflatten(-1, (-1, size))  # (Hkv, R, C, size)
        for head_weights, left_out in zip(by_chunk, chunks, strict=True):
            head_weights.index_fill_(1, left_out, 0.0)


class SelectionPolicy(ABC):
    """A ranking of the prefix's chunks. One object serves one text, all its layers and heads."""

    traits: ClassVar[PolicyTraits]

    @abstractmethod
    def scores(self, rows: ObservedRows, layer: int, head: int, chunk: int) -> Tensor:
        """Return the worth (Hkv, C) float32 of each of the C whole chunks of `chunk` tokens.

        The rows' KV heads are `head`, `head` + 1, ... of the layer.
        """

    def select(self, rows: ObservedRows, layer: int, head: int, chunk: int, count: int) -> Tensor:
        """Return indices (Hkv, count) of the chunks to keep per KV head.

        Chunk 0, the sink, always stays.
        """
        scores = self.scores(rows, layer, head, chunk)
        scores[:, 0] = torch.inf
        return scores.topk(count, dim=1, sorted=False).indices


class MeanKey(SelectionPolicy):
    """The rows' queries against each chunk's mean key.

    The measure of TriForce, arXiv 2404.11912, section 4.1.
    """

    traits = POLICY_TRAITS["mean-key"]

    def scores(self, rows: ObservedRows, layer: int, head: int, chunk: int) -> Tensor:
        means = _mean_keys(rows.keys, chunk)
        logits = rows.q.float() @ means.transpose(1, 2)  # (Hkv, R, C)
        shares = logits.log_softmax(-1)
        return shares.logsumexp(1)  # in logarithms: far chunks still have an order


class Static(MeanKey):
    """The choice as published (TriForce, section 4.1): once, by the last prompt token's query."""

    traits = POLICY_TRAITS["static"]


class Window(SelectionPolicy):
    """The most recent chunks, and the sink.

    What StreamingLLM keeps (Xiao et al. 2023, arXiv 2309.17453, section 3.2).
    """

    traits = POLICY_TRAITS["window"]

    def scores(self, rows: ObservedRows, layer: int, head: int, chunk: int) -> Tensor:
        heads, tokens, _ = rows.keys.shape
        chunks = tokens // chunk
        ages = torch.arange(chunks, dtype=torch.float32, device=rows.keys.device)
        return ages.repeat(heads, 1)


class Mass(SelectionPolicy):
    """The attention the rows really give to each chunk.

    A chunk behind one that is read may be read next, at half the odds.
    """

    traits = POLICY_TRAITS["mass"]

    def scores(self, rows: ObservedRows, layer: int, head: int, chunk: int) -> Tensor:
        mass = _by_chunk(rows.mass, chunk)
        behind = mass[:, :-1] / 2
        behind = F.pad(behind, (1, 0))
        return torch.maximum(mass, behind)


class Accumulated(SelectionPolicy):
    """Heavy hitters: attention summed over all rows observed so far.

    After H2O (Zhang et al. 2023, arXiv 2306.14048, section 4.1), which sums over every row of the
    prompt; here the rows are those that a policy gets to see.
    """

    traits = POLICY_TRAITS["accumulated"]

    def __init__(self) -> None:
        # by layer and KV head: heads come in groups of any size
        self._sums: dict[tuple[int, int], Tensor] = {}

    def scores(self, rows: ObservedRows, layer: int, head: int, chunk: int) -> Tensor:
        sums = _by_chunk(rows.mass, chunk)
        for index, row in enumerate(sums, head):
            before = self._sums.get((layer, index))
            if before is not None:
                row[: len(before)] += before
            self._sums[layer, index] = row
        return sums.clone()  # `select` writes into it


def _mean_keys(keys: Tensor, chunk: int) -> Tensor:
    """Return the mean (Hkv, C, D) float32 of each chunk of keys (Hkv, N, D)."""
    means = []
    for head_keys in keys:
        by_chunk = head_keys.unflatten(0, (-1, chunk))  # (C, chunk, D)
        mean = by_chunk.mean(1, dtype=torch.float32)
        means.append(mean)
    return torch.stack(means)


def _by_chunk(mass: Tensor, chunk: int) -> Tensor:
    """Return the mass (Hkv, N) of keys as that of chunks (Hkv, C)."""
    by_chunk = mass.unflatten(1, (-1, chunk))  # (Hkv, C, chunk)
    return by_chunk.sum(-1)


POLICIES: dict[str, type[SelectionPolicy]] = {
    "static": Static,
    "window": Window,
    "accumulated": Accumulated,
    "mean-key": MeanKey,
    "mass": Mass,
}
