"""Passes, as those who decode ask for them, and passes that several texts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.cache.base import Cache
from parallel.model.transformer import KVCacheLike, Transformer


class ForwardFn(Protocol):
    """A model, or what stands for one."""

    def __call__(self, tokens: Tensor, cache: KVCacheLike, rows: int) -> Tensor:
        """Read tokens (T,) behind what the cache holds; return logits (rows, V) of the last."""
        ...


@dataclass(frozen=True)
class ForwardRequest:
    """A pass to be made: `model` reads `tokens` (T,) behind what `cache` holds.

    What comes of it are logits (rows, V), those that follow each of the last `rows` tokens. The
    tokens count only once the cache is advanced.
    """

    model: ForwardFn
    cache: Cache
    tokens: Tensor
    rows: int


class BatchedCache:
    """The caches of several texts in a pass they share: each attends with its own rows."""

    length = 0  # each cache has its own
    is_batch_invariant = False

    def __init__(self, caches: Sequence[KVCacheLike], counts: list[int]):
        """`counts`: the rows of each cache's text."""
        self._caches, self._counts = caches, counts

    def begin_forward(self, rows: int) -> None:
        """Start a pass on every cache."""
        for cache, count in zip(self._caches, self._counts, strict=True):
            cache.begin_forward(count)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Do as `Cache.attend` with each text's rows of q (T, Hq, D), k and v (T, Hkv, D)."""
        parts = [x.split(self._counts) for x in (q, k, v)]
        outs = []
        for cache, own_q, own_k, own_v in zip(self._caches, *parts, strict=True):
            outs.append(cache.attend(layer, own_q, own_k, own_v, cache.length))
        return torch.cat(outs)


@torch.inference_mode()
def run_forward(passes: Sequence[ForwardRequest]) -> list[Tensor]:
    """Make passes of one model, on caches of several texts, as one; return the logits of each.

    There is no padding: texts may be of any lengths, and read as many tokens as they like.
    """
    model = passes[0].model
    if len(passes) == 1:
        (asked,) = passes
        return [model(asked.tokens, asked.cache, asked.rows)]
    assert isinstance(model, Transformer)
    tokens = [asked.tokens for asked in passes]
    rows = [asked.rows for asked in passes]
    x = batched_hidden_states(model, tokens, [asked.cache for asked in passes])
    parts = x.split([len(each) for each in tokens])
    last = [part[-count:] for part, count in zip(parts, rows, strict=True)]
    return list(model.logits(torch.cat(last)).split(rows))


def batched_hidden_states(
    model: Transformer, tokens: Sequence[Tensor], caches: Sequence[KVCacheLike]
) -> Tensor:
    """Read tokens (T,) of each text behind what its cache holds, in one pass.

    Products are computed once for the rows of all. Returns the last layer's hidden states of all
    texts, one behind the other: (all T, hidden).
    """
    counts = [len(each) for each in tokens]
    return model.hidden_states(torch.cat(list(tokens)), BatchedCache(caches, counts))
