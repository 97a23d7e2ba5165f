"""Which chunks of the context a retrieval cache keeps: policies behind one seam.

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


class Seen:
    """Some rows of a pass against the prefix keys of a few KV heads; what is derived is computed
    once, when it is asked for.
    """

    def __init__(self, q: Tensor, keys: Tensor, rows: int):
        """q (T, Hq, D) rotated queries, newest last; keys (Hkv, N, D) rotated. Keeps `rows` of
        them, evenly spaced, with the last.

        Grouped query heads share their KV head, so their rows stand beside each other: R = rows x
        group.
        """
        count = min(rows, len(q))
        picked = torch.arange(1, count + 1, device=q.device) * len(q) // count - 1
        grouped = q[picked].unflatten(1, (len(keys), -1)).permute(1, 0, 2, 3).flatten(1, 2)
        self.q, self.keys = grouped * q.shape[-1] ** -0.5, keys  # (Hkv, R, D)

    @cached_property
    def _scores(self) -> tuple[Tensor, Tensor]:
        # where a batch is slower than one head after another
        if self.keys.is_cpu and self.keys.dtype != torch.float32:
            scores = torch.stack([keys @ q.T for q, keys in zip(self.q, self.keys, strict=True)])
        else:
            # (Hkv, N, R): faster this way round, on a CPU
            scores = self.keys @ self.q.transpose(1, 2)
        scores = scores.transpose(1, 2).float().contiguous()
        most = scores.amax(-1, keepdim=True)
        return scores.sub_(most).exp_(), most[..., 0]

    @property
    def weights(self) -> Tensor:
        """exp(q . k - most), (Hkv, R, N) float32: 1 at a row's likeliest key."""
        return self._scores[0]

    @property
    def most(self) -> Tensor:
        """The largest q . k of each row, (Hkv, R) float32."""
        return self._scores[1]

    @cached_property
    def mass(self) -> Tensor:
        """Attention that each key of the prefix gets from all rows together, (Hkv, N) float32; a
        row has 1 to give.
        """
        return (self.weights.sum(-1).reciprocal()[:, None] @ self.weights)[:, 0]

    def leave_out(self, chunks: Tensor, size: int) -> None:
        """The tokens of these chunks (Hkv, n) of `size` tokens weigh nothing from now on."""
        # (Hkv, R, C, size)
        whole = self.weights[..., : self.keys.shape[1] // size * size].unflatten(-1, (-1, size))
        for weights, left_out in zip(whole, chunks, strict=True):
            weights.index_fill_(1, left_out, 0.0)


class SelectionPolicy(ABC):
    """Ranks chunks of the prefix. One object serves one text, all its layers and heads."""

    traits: ClassVar[PolicyTraits]

    @abstractmethod
    def scores(self, seen: Seen, layer: int, head: int, chunk: int) -> Tensor:
        """The worth (Hkv, C) float32 of each of the C whole chunks for KV heads `head`, `head` + 1,
        ... of the layer.
        """

    def select(self, seen: Seen, layer: int, head: int, chunk: int, count: int) -> Tensor:
        """Indices (Hkv, count) of the chunks to keep per KV head. Chunk 0, the sink, always
        stays.
        """
        scores = self.scores(seen, layer, head, chunk)
        scores[:, 0] = torch.inf
        return scores.topk(count, dim=1, sorted=False).indices


class MeanKey(SelectionPolicy):
    """The rows' queries against each chunk's mean key (the measure of TriForce, arXiv 2404.11912,
    section 4.1).
    """

    traits = POLICY_TRAITS["mean-key"]

    def scores(self, seen: Seen, layer: int, head: int, chunk: int) -> Tensor:
        # (Hkv, C, D)
        means = torch.stack(
            [keys.unflatten(0, (-1, chunk)).mean(1, dtype=torch.float32) for keys in seen.keys]
        )
        logits = seen.q.float() @ means.transpose(1, 2)  # (Hkv, R, C)
        return logits.log_softmax(-1).logsumexp(1)  # in logarithms: far chunks still have an order


class Static(MeanKey):
    """As published (TriForce, section 4.1): by the last prompt token's query alone, once."""

    traits = POLICY_TRAITS["static"]


class Window(SelectionPolicy):
    """The most recent chunks, and the sink: what StreamingLLM keeps (Xiao et al. 2023, arXiv
    2309.17453, section 3.2).
    """

    traits = POLICY_TRAITS["window"]

    def scores(self, seen: Seen, layer: int, head: int, chunk: int) -> Tensor:
        heads, tokens, _ = seen.keys.shape
        return torch.arange(tokens // chunk, dtype=torch.float32, device=seen.keys.device).repeat(
            heads, 1
        )


class Mass(SelectionPolicy):
    """The attention the rows really give to each chunk; and a chunk behind one that is read may be
    read next, at half the odds.
    """

    traits = POLICY_TRAITS["mass"]

    def scores(self, seen: Seen, layer: int, head: int, chunk: int) -> Tensor:
        mass = seen.mass.unflatten(1, (-1, chunk)).sum(-1)  # (Hkv, C)
        return torch.maximum(mass, F.pad(mass[:, :-1] / 2, (1, 0)))


class Accumulated(SelectionPolicy):
    """Heavy hitters: attention summed over all rows seen so far (after H2O, Zhang et al. 2023,
    arXiv 2306.14048, section 4.1).

    H2O sums over every row of the prompt; here the rows are those that a policy gets to see.
    """

    traits = POLICY_TRAITS["accumulated"]

    def __init__(self) -> None:
        # by layer and KV head: heads come in groups of any size
        self._sums: dict[tuple[int, int], Tensor] = {}

    def scores(self, seen: Seen, layer: int, head: int, chunk: int) -> Tensor:
        now = seen.mass.unflatten(1, (-1, chunk)).sum(-1)
        for index, row in enumerate(now, head):
            if (before := self._sums.get((layer, index))) is not None:
                row[: len(before)] += before
            self._sums[layer, index] = row
        return now.clone()  # `select` writes into it


POLICIES: dict[str, type[SelectionPolicy]] = {
    "static": Static,
    "window": Window,
    "accumulated": Accumulated,
    "mean-key": MeanKey,
    "mass": Mass,
}
