"""Which chunks of the context a retrieval cache keeps: policies behind one seam."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class SelectionPolicy(ABC):
    """Ranks a layer's chunks by what the last rows attend to."""

    @abstractmethod
    def scores(self, q: Tensor, chunks: Tensor) -> Tensor:
        """q (T, Hq, D) rotated queries, newest last; chunks (Hkv, C, chunk, D) rotated keys; returns (Hkv, C) float32."""

    def select(self, q: Tensor, chunks: Tensor, count: int) -> Tensor:
        """Indices (Hkv, count) of the chunks to keep per KV head, in order of position. Chunk 0, the sink, always stays."""
        scores = self.scores(q, chunks)
        scores[:, 0] = torch.inf
        return scores.topk(count, dim=1).indices.sort(dim=1).values


class MeanKey(SelectionPolicy):
    """The last prompt token's query against each chunk's mean key (TriForce, arXiv 2404.11912, section 4.1).

    Grouped query heads share chunks: each head's scores are normalised over the chunks, then summed over the group.
    """

    def scores(self, q: Tensor, chunks: Tensor) -> Tensor:
        means = chunks.mean(dim=2, dtype=torch.float32)  # (Hkv, C, D)
        query = q[-1].float().unflatten(0, (means.shape[0], -1))  # (Hkv, G, D)
        logits = query @ means.transpose(1, 2) * query.shape[-1] ** -0.5  # (Hkv, G, C)
        return logits.log_softmax(-1).logsumexp(1)  # in logarithms: far chunks still have an order


POLICIES: dict[str, type[SelectionPolicy]] = {"mean-key": MeanKey}
