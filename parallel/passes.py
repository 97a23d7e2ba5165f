"""Passes, as those who decode ask for them, and passes that several texts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.cache import Cache
from parallel.model import Llama


class Reader(Protocol):
    """A model, or what stands for one."""

    def __call__(self, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Read tokens (T,) behind what the cache holds; return logits (rows, V) of the last."""
        ...


@dataclass(frozen=True)
class Pass:
    """A pass to be made: `model` reads `tokens` (T,) behind what `cache` holds.

    What comes of it are logits (rows, V), those that follow each of the last `rows` tokens. The
    tokens count only once the cache is advanced.
    """

    model: Reader
    cache: Cache
    tokens: Tensor
    rows: int


class SharedCache:
    """The caches of several texts in a pass they share: each attends with its own rows."""

    length = 0  # each cache has its own
    is_steady = False

    def __init__(self, passes: Sequence[Pass]):
        self._caches = [asked.cache for asked in passes]
        self._counts = [len(asked.tokens) for asked in passes]

    def begin(self, rows: int) -> None:
        """Start a pass on every cache."""
        for cache, count in zip(self._caches, self._counts, strict=True):
            cache.begin(count)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Do as `Cache.attend` with each text's rows of q (T, Hq, D), k and v (T, Hkv, D)."""
        parts = [x.split(self._counts) for x in (q, k, v)]
        outs = []
        for cache, own_q, own_k, own_v in zip(self._caches, *parts, strict=True):
            outs.append(cache.attend(layer, own_q, own_k, own_v, cache.length))
        return torch.cat(outs)


@torch.inference_mode()
def make_together(passes: Sequence[Pass]) -> list[Tensor]:
    """Make passes of one model, on caches of several texts, as one; return the logits of each.

    Products are computed once for the rows of all. There is no padding: texts may be of any
    lengths, and read as many tokens as they like.
    """
    model = passes[0].model
    assert isinstance(model, Llama)
    tokens = torch.cat([asked.tokens for asked in passes])
    x = model.read(tokens, SharedCache(passes))  # (T, hidden)
    parts = x.split([len(asked.tokens) for asked in passes])
    rows = [asked.rows for asked in passes]
    last = [part[-count:] for part, count in zip(parts, rows, strict=True)]
    return list(model.logits(torch.cat(last)).split(rows))
