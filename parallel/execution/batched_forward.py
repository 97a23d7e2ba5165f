"""Forward requests of the decoders, and forward passes that several sequences share."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from offload.attention.folding import Partial, concatenated
from offload.cache.base import Cache
from offload.cache.prediction import PredictionCache
from offload.recurrent.recurrence import RecurrentInputs
from parallel.model.pipeline import LayerSteps, finish
from parallel.model.transformer import KVCacheLike, Transformer


class ForwardFn(Protocol):
    """A model, or a callable with the signature of one."""

    def __call__(self, tokens: Tensor, cache: KVCacheLike, rows: int) -> Tensor:
        """Run tokens (T,) after the cache's content; return logits (rows, V) of the last ones.

        `rows` may be 0, if other tokens follow before any logits are needed.
        """
        ...


@dataclass(frozen=True)
class ForwardRequest:
    """A forward pass to run: `model` on `tokens` (T,), after the content of `cache`.

    It returns logits (rows, V), those that follow each of the last `rows` tokens, which may be 0.
    The tokens count only once the cache is advanced.

    While it waits for the host link, `meanwhile` may run, on other caches: it yields requests, and
    is sent the logits of each. It need not run to its end.
    """

    model: ForwardFn
    cache: Cache
    tokens: Tensor
    rows: int
    ids: Sequence[int] | None = None  # the same tokens, if the host knows them
    meanwhile: Generator[ForwardRequest, Tensor, None] | None = None


class BatchedCache:
    """The caches of several sequences in one forward: each attends with its own query tokens."""

    length = 0  # each cache has its own
    is_batch_invariant = False

    def __init__(self, caches: Sequence[KVCacheLike], counts: list[int], rows: list[int]):
        """`counts`: query tokens of each cache's sequence; `rows`: those that logits follow."""
        self._caches, self._counts, self._rows = caches, counts, rows

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

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor:
        """Call `Cache.recur` with each sequence's part of the inputs."""
        outs, first = [], 0
        for cache, count in zip(self._caches, self._counts, strict=True):
            own = inputs.rows(slice(first, first + count))
            outs.append(cache.recur(layer, own, cache.length))
            first += count
        return torch.cat(outs)

    def previous_hidden_states(self, rows: int) -> Tensor:
        """Return what each cache's `previous_hidden_states` does, (T, hidden) in all."""
        caches = (cast(PredictionCache, cache) for cache in self._caches)
        parts = zip(caches, self._counts, strict=True)
        return torch.cat([cache.previous_hidden_states(count) for cache, count in parts])

    def keep_hidden_states(self, states: Tensor, rows: int) -> None:
        """Call `Cache.keep_hidden_states` with each sequence's part of states (T, hidden)."""
        parts = zip(self._caches, states.split(self._counts), self._rows, strict=True)
        for cache, own, own_rows in parts:
            cache.keep_hidden_states(own, own_rows)


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
    return finish(forward_steps(requests))


def forward_steps(requests: Sequence[ForwardRequest]) -> LayerSteps[list[Tensor]]:
    """Run `run_forward` in steps, in inference mode; return its logits."""
    model = requests[0].model
    assert isinstance(model, Transformer)
    if len(requests) == 1:
        (request,) = requests
        steps = model.forward_steps(request.tokens, request.cache, request.rows)
        return [(yield from steps)]
    tokens = [request.tokens for request in requests]
    rows = [request.rows for request in requests]
    counts = [len(part) for part in tokens]
    cache = BatchedCache([request.cache for request in requests], counts, rows)
    # matrix products are computed once for the rows of all sequences
    x = yield from model.hidden_state_steps(torch.cat(tokens), cache)
    cache.keep_hidden_states(x, sum(rows))
    parts = x.split(counts)
    last = [part[len(part) - count :] for part, count in zip(parts, rows, strict=True)]
    return list(model.logits(torch.cat(last)).split(rows))
