"""Forward requests of the decoders, and forward passes that several sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.attention.folding import Partial, concatenated
from offload.cache.base import Cache
from offload.recurrent.delta_rule import DeltaInputs
from parallel.model.transformer import KVCacheLike, Transformer


class ForwardFn(Protocol):
    """A model, or a callable with the signature of one."""

    def __call__(self, tokens: Tensor, cache: KVCacheLike, rows: int) -> Tensor:
        """Run tokens (T,) after the cache's content; return logits (rows, V) of the last ones."""
        ...


@dataclass(frozen=True)
class ForwardRequest:
    """A forward pass to run: `model` on `tokens` (T,), after the content of `cache`.

    It returns logits (rows, V), those that follow each of the last `rows` tokens. The tokens count
    only once the cache is advanced.
    """

    model: ForwardFn
    cache: Cache
    tokens: Tensor
    rows: int


class BatchedCache:
    """The caches of several sequences in one forward: each attends with its own query tokens."""

    length = 0  # each cache has its own
    is_batch_invariant = False

    def __init__(self, caches: Sequence[KVCacheLike], counts: list[int]):
        """`counts`: query tokens of each cache's sequence."""
        self._caches, self._counts = caches, counts

    def begin_forward(self, rows: int) -> None:
        """Begin a forward on every cache."""
        for cache, count in zip(self._caches, self._counts, strict=True):
            cache.begin_forward(count)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        """Call `Cache.attend` with each sequence's part of q (T, Hq, D), k and v (T, Hkv, D)."""
        parts = [x.split(self._counts) for x in (q, k, v)]
        outs = []
        for cache, own_q, own_k, own_v in zip(self._caches, *parts, strict=True):
            outs.append(cache.attend(layer, own_q, own_k, own_v, cache.length))
        return concatenated(outs, dim=0)

    def recur(self, layer: int, inputs: DeltaInputs, start: int) -> Tensor:
        """Call `Cache.recur` with each sequence's part of the inputs."""
        outs, first = [], 0
        for cache, count in zip(self._caches, self._counts, strict=True):
            own = inputs.rows(slice(first, first + count))
            outs.append(cache.recur(layer, own, cache.length))
            first += count
        return torch.cat(outs)


@torch.inference_mode()
def run_forward(requests: Sequence[ForwardRequest]) -> list[Tensor]:
    """Run requests of one model, on caches of several sequences, as one forward.

    Returns the logits of each. There is no padding: the sequences may have any lengths and any
    numbers of query tokens.
    """
    model = requests[0].model
    if len(requests) == 1:
        (request,) = requests
        return [model(request.tokens, request.cache, request.rows)]
    assert isinstance(model, Transformer)
    tokens = [request.tokens for request in requests]
    rows = [request.rows for request in requests]
    counts = [len(part) for part in tokens]
    cache = BatchedCache([request.cache for request in requests], counts)
    # matrix products are computed once for the rows of all sequences
    parts = model.hidden_states(torch.cat(tokens), cache).split(counts)
    last = [part[-count:] for part, count in zip(parts, rows, strict=True)]
    return list(model.logits(torch.cat(last)).split(rows))
