"""CUDA graphs: short forwards are captured once and replayed with one launch; a forward of a 7B
model takes hundreds.

Capture follows gpt-fast and torch's notes on CUDA graphs: inputs and results stay at fixed
addresses, and a warm-up runs first. A graph is compared with the launches it captured as soon as it
is captured, one slot further. A forward that cannot be captured, or whose graph gives other
results, keeps running eagerly. All ranks decide together: a collective is replayed by all or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.cache.base import Cache
from offload.cache.static_shape import StaticCache, StaticForward
from offload.errors import TierForceError
from parallel.config.parameter_count import MAX_GRAPH_TOKENS, MAX_STATIC_TOKENS
from parallel.execution.batched_forward import ForwardRequest, batched_hidden_states, run_forward
from parallel.model.transformer import Transformer
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.process_group import TensorParallelGroup

USES = 16  # forwards with one key before it is captured: rare keys do not pay for it
# Limit of graphs on a device: no more batched forwards, which have many keys, are captured then.
# Each graph holds its launches and logits in device memory.
MAX_GRAPHS = 48
# largest difference of a replay from the launches, as a share of the largest expected value
_TOLERANCE = 0.01


def cuda_graphs_supported(group: TensorParallelGroup) -> bool:
    """Return whether all-reduces can be captured and replayed here, by trying it.

    All ranks call it, and get the same answer.
    """
    if not all(group.gather(_may_support(group))):
        return False
    x = torch.ones(8, device=group.device)
    replay = None

    def double() -> Tensor:
        return group.all_reduce(x * 2)

    with suppress(RuntimeError, TierForceError):
        double()
        replay = group.graph_capturer.capture(double)
    all_captured = all(group.gather(replay is not None))  # before any rank replays a collective
    if replay is None or not all_captured:
        return False
    is_correct = False
    with suppress(RuntimeError, TierForceError):
        x.fill_(3.0)
        is_correct = bool((replay() == 6 * group.size).all())
    return all(group.gather(is_correct))


def _may_support(group: TensorParallelGroup) -> bool:
    if group.device.type != "cuda":
        return False
    return group.size == 1 or "cuda:nccl" in str(dist.get_backend_config())


class GraphRunner:
    """Runs a sequence's forwards, and those batched with other sequences; replays the short ones.

    Graphs need a `StaticCache`. Forwards with one key (caches, tokens, rows) are captured once they
    are frequent. `counts` holds how many keys are replayed, how many were refused, why the first
    was, and the seconds spent.
    """

    def __init__(self, enabled: bool, capturer: GraphCapturer, uses: int | None = None):
        """Start without captured graphs.

        Args:
            enabled: whether forwards are captured; if not, all run eagerly.
            capturer: the group's.
            uses: forwards with a key until it is captured, at least 1; USES by default.
        """
        self.enabled = enabled
        self.capturer = capturer
        self.uses = USES if uses is None else uses
        self.counts: dict[str, Any] = {"replayed": 0, "refused": 0, "why": None, "seconds": 0.0}
        self._keys: dict[tuple[int, ...], _GraphKey] = {}  # key: tokens, rows, and the caches' ids

    @property
    def report(self) -> dict[str, Any] | None:
        """The live `counts`; None if all forwards run eagerly."""
        return self.counts if self.enabled else None

    def warm_up(self, model: Transformer, tokens: Tensor, cache: StaticCache, rows: int) -> None:
        """Run such forwards until they are replayed or refused; the cache does not advance."""
        for _ in range(self.uses if self.enabled else 0):
            self(model, tokens, cache, rows)

    def evict(self, caches: Iterable[Cache] | None = None) -> None:
        """Free the graphs on any of these caches, by default all of them.

        Called when the caches' sequence ends.
        """
        if caches is None:
            self._keys.clear()
            return
        evicted = {id(cache) for cache in caches}
        for key in list(self._keys):
            if not evicted.isdisjoint(key[2:]):
                del self._keys[key]

    def __call__(self, model: Transformer, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Return logits (rows, V) of the last `rows` of tokens (T,), after the cache's content."""
        (logits,) = self.run([ForwardRequest(model, cache, tokens, rows)])
        return logits

    @torch.inference_mode()
    def run(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Run requests of one model, on caches of several sequences, as one forward.

        Returns the logits of each. All ranks of the model call it with the same requests. In a
        shared graph all sequences have the same number of query tokens, so that there are few keys:
        the shorter ones are padded with tokens whose results are ignored.
        """
        width = max(len(request.tokens) for request in requests)
        rows = max(request.rows for request in requests)
        is_short = width <= MAX_GRAPH_TOKENS and len(requests) * width <= MAX_STATIC_TOKENS
        if not (self.enabled and is_short and _have_slots(requests, width)):
            return run_forward(requests)
        key = (width, rows, *(id(request.cache) for request in requests))
        if key not in self._keys:
            self._keys[key] = _GraphKey(requests, width, rows)
        entry = self._keys[key]
        if entry.captured is not None:
            return entry.split_logits(entry.captured.replay(requests), requests)
        entry.uses += 1
        # a capture needs a slot more, to be compared one further
        if entry.is_refused or entry.uses % self.uses or not _have_slots(requests, width + 1):
            return run_forward(requests)
        started = time.perf_counter()
        logits = self._capture(entry, requests)
        self.counts["seconds"] += time.perf_counter() - started
        return logits

    def _capture(self, entry: _GraphKey, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Capture and compare a graph, unless a rank objects; return the logits of the forward."""
        is_full = self.capturer.count >= MAX_GRAPHS
        if len(requests) > 1 and any(entry.model.group.gather(is_full)):
            return run_forward(requests)  # retried when finished sequences' graphs are evicted
        if self._is_refused(entry, self.capturer.broken):  # before any rank captures in vain
            return run_forward(requests)
        captured = _CapturedGraph(entry, requests)
        captured.launch(requests)  # warm-up that a capture needs
        objection = None
        try:
            captured.graph = self.capturer.capture(captured.run)
        except (RuntimeError, TierForceError) as error:  # an operation that cannot be captured
            objection = repr(error.__cause__ or error)
        # before any rank replays a collective, all have captured it
        if not self._is_refused(entry, objection) and not self._is_refused(
            entry, captured.difference(requests)
        ):
            entry.captured = captured
            self.counts["replayed"] += 1
        return entry.split_logits(captured.launch(requests), requests)

    def _is_refused(self, entry: _GraphKey, objection: str | None) -> bool:
        """Return whether any rank of the model objects to this graph; if so, mark it refused."""
        gathered = entry.model.group.gather(objection)
        objections = [reason for reason in gathered if reason is not None]
        if not objections:
            return False
        entry.is_refused = True
        self.counts["refused"] += 1
        self.counts["why"] = self.counts["why"] or objections[0]
        return True


def _have_slots(requests: Sequence[ForwardRequest], width: int) -> bool:
    """Return whether forwards of `width` tokens on the requests' caches can be captured."""
    return all(
        isinstance(request.cache, StaticCache) and request.cache.has_room(width)
        for request in requests
    )


class _GraphKey:
    """Forwards of one model on the same caches, with the same tokens and rows per sequence."""

    def __init__(self, requests: Sequence[ForwardRequest], width: int, rows: int):
        model = requests[0].model
        assert isinstance(model, Transformer)
        self.model = model
        self.width, self.rows = width, rows
        self.captured: _CapturedGraph | None = None  # if it may be replayed
        self.is_refused = False
        self.uses = 0

    def split_logits(self, logits: Tensor, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Split logits, (rows, V) of each sequence, into those that each request needs."""
        own = logits.split(self.rows)
        return [part[-request.rows :] for part, request in zip(own, requests, strict=True)]


class _CapturedGraph:
    """A forward in static shapes, with input buffers at the addresses that its graph reads."""

    def __init__(self, entry: _GraphKey, requests: Sequence[ForwardRequest]):
        self._static = [_static_forward(request, entry.width) for request in requests]
        self._tokens = [request.tokens.new_zeros(entry.width) for request in requests]
        # end of each sequence's own tokens in the concatenation of all
        self._ends = self._tokens[0].new_zeros(len(requests))
        # Partials: bound methods would make a reference cycle that outlives the sequence.
        self.run: Callable[[], Tensor]
        if len(requests) == 1:
            self.run = partial(entry.model, self._tokens[0], self._static[0], entry.rows)
        else:
            offsets = torch.arange(-entry.rows, 0, device=self._ends.device)
            self.run = partial(
                _logits_at_ends, entry.model, self._tokens, self._static, self._ends, offsets
            )
        self.graph: Callable[[], Tensor] = self.run

    def prepare(self, requests: Sequence[ForwardRequest], skipped: int = 0) -> None:
        """Write the next forward's input to its buffers, to run after the caches' content.

        Between them, `skipped` slots are left as they are.
        """
        for index, (static, buffer, request) in enumerate(
            zip(self._static, self._tokens, requests, strict=True)
        ):
            static.prepare(skipped)
            count = len(request.tokens)
            buffer[:count].copy_(request.tokens)
            if len(requests) > 1:
                self._ends[index].fill_(index * len(buffer) + count)

    def difference(self, requests: Sequence[ForwardRequest]) -> str | None:
        """Return how a replay differs from the launches that were captured, None if it does not.

        They are run one slot further than they were captured, where a position that is baked in
        shows. The forward itself has to be launched afterwards, since they write to its slots.
        """
        self.prepare(requests, skipped=1)
        for static in self._static:
            static.rows().zero_()  # reveals a replay that writes its KV elsewhere
        replayed, replayed_kv = self.graph().clone(), self._written_kv()
        launched, launched_kv = self.run(), self._written_kv()
        logits_error = _difference(replayed, launched)
        kv_error = _difference(replayed_kv, launched_kv)
        if logits_error <= _TOLERANCE and kv_error <= _TOLERANCE:  # false if one is NaN
            return None
        return f"replayed logits are off by {logits_error:.2g}, written KV by {kv_error:.2g}"

    def _written_kv(self) -> Tensor:
        """Return a copy of the first layer's KV in the slots that the forward writes to."""
        return torch.cat([static.rows().flatten() for static in self._static])

    def launch(self, requests: Sequence[ForwardRequest]) -> Tensor:
        """Return the logits (R, V) of the forward in static shapes, launched by the host."""
        self.prepare(requests)
        return self.run().clone()

    def replay(self, requests: Sequence[ForwardRequest]) -> Tensor:
        """Return the logits of the replayed graph."""
        self.prepare(requests)
        return self.graph().clone()  # the next replay overwrites them


def _static_forward(request: ForwardRequest, width: int) -> StaticForward:
    assert isinstance(request.cache, StaticCache)
    return StaticForward(request.cache, width)


@torch.inference_mode()
def _logits_at_ends(
    model: Transformer,
    tokens: Sequence[Tensor],
    caches: Sequence[StaticForward],
    ends: Tensor,
    offsets: Tensor,
) -> Tensor:
    """Run tokens (T,) of each sequence in one forward; return logits, (rows, V) of each.

    They belong to the tokens at `offsets` (rows,), all negative, from each of `ends` (sequences,).
    Both are in device memory.
    """
    x = batched_hidden_states(model, tokens, caches)
    indices = (ends[:, None] + offsets).flatten()
    # A sequence with fewer tokens than `rows` has leading indices before its own tokens.
    return model.logits(x.index_select(0, indices.clamp(min=0)))


def _difference(x: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((x - expected).abs().max() / expected.abs().max())
