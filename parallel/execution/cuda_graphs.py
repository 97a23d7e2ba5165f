"""CUDA graphs: short forwards are captured once and replayed with one launch; a forward of a 7B
model takes hundreds.

Capture follows gpt-fast and torch's notes on CUDA graphs: inputs and results stay at fixed
addresses, and a warm-up runs first. A graph is verified before use, at another length of the
sequence than it was captured at. A forward that cannot be captured, or whose graph gives other
results, keeps running eagerly. All ranks decide together: a collective is replayed by all or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
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
# Largest differences in a comparison, as a share of the largest expected value:
# a replay's logits and written KV, against those of the launches that were captured
_REPLAY_TOLERANCE = 0.01
# Logits of the launches in static shapes, against those of the eager forward, with other kernels:
# in 16 bits an 8B's differ by 0.05 on an H200, as much as with three rows more in a matmul.
# Unrelated logits differ by more than 1.
_STATIC_TOLERANCE = 0.25


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
        """Run such forwards until they are replayed or refused; keep the cache's length."""
        if not self.enabled:
            return
        for _ in range(self.uses):
            self(model, tokens, cache, rows)
        cache.advance(1)
        self(model, tokens, cache, rows)
        cache.crop(cache.length - 1)

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
        if not (
            self.enabled and is_short and all(_has_slots(request, width) for request in requests)
        ):
            return run_forward(requests)
        key = (width, rows, *(id(request.cache) for request in requests))
        if key not in self._keys:
            self._keys[key] = _GraphKey(requests, width, rows)
        entry = self._keys[key]
        if entry.state is _State.REPLAYED:
            assert entry.captured is not None
            return entry.split_logits(entry.captured.replay(requests), requests)
        started = time.perf_counter()
        logits = self._try_capture(entry, requests)
        if logits is None:
            return run_forward(requests)
        self.counts["seconds"] += time.perf_counter() - started
        return logits

    def _try_capture(
        self, entry: _GraphKey, requests: Sequence[ForwardRequest]
    ) -> list[Tensor] | None:
        """Return this forward's logits if it served to capture or verify a graph; else None."""
        entry.uses += 1
        if entry.state is _State.NEW and entry.uses % self.uses == 0:
            return self._capture(entry, requests)
        captured = entry.captured
        if entry.state is _State.CAPTURED and captured is not None and captured.is_at_other_length:
            return self._verify(entry, captured, requests)
        return None

    def _capture(self, entry: _GraphKey, requests: Sequence[ForwardRequest]) -> list[Tensor] | None:
        is_full = self.capturer.count >= MAX_GRAPHS
        if len(requests) > 1 and any(entry.model.group.gather(is_full)):
            return None  # retried when graphs of finished sequences have been evicted
        if self._is_refused(entry, self.capturer.broken):  # before any rank captures in vain
            return None
        captured = _CapturedGraph(entry, requests)
        logits = captured.launch(requests)  # warm-up that a capture needs
        objection = None
        try:
            captured.graph = self.capturer.capture(captured.run)
        except (RuntimeError, TierForceError) as error:  # an operation that cannot be captured
            objection = repr(error.__cause__ or error)
        if not self._is_refused(entry, objection):
            entry.state, entry.captured = _State.CAPTURED, captured
        return entry.split_logits(logits, requests)

    def _verify(
        self, entry: _GraphKey, captured: _CapturedGraph, requests: Sequence[ForwardRequest]
    ) -> list[Tensor]:
        """Accept or refuse the graph; return the logits of the eager forward.

        A replay must agree with the launches it captured, and these with the eager forward.
        """
        captured.prepare(requests)
        captured.erase()  # reveals a replay that writes its KV elsewhere
        replayed, replayed_kv = captured.graph().clone(), captured.written_kv()
        launched, launched_kv = captured.launch(requests), captured.written_kv()
        logits = run_forward(requests)
        replay_error = _difference(replayed, launched)
        kv_error = _difference(replayed_kv, launched_kv)
        static_logits = torch.cat(entry.split_logits(launched, requests))
        static_error = _difference(static_logits, torch.cat(logits))
        objection = None
        if not (
            replay_error <= _REPLAY_TOLERANCE
            and kv_error <= _REPLAY_TOLERANCE
            and static_error <= _STATIC_TOLERANCE
        ):  # also true if one is NaN
            objection = (
                f"replayed logits are off by {replay_error:.2g}, written KV by {kv_error:.2g}, "
                f"logits of static shapes by {static_error:.2g}"
            )
        if not self._is_refused(entry, objection):
            entry.state = _State.REPLAYED
            self.counts["replayed"] += 1
        return logits

    def _is_refused(self, entry: _GraphKey, objection: str | None) -> bool:
        """Return whether any rank of the model objects to this graph; if so, mark it refused."""
        gathered = entry.model.group.gather(objection)
        objections = [reason for reason in gathered if reason is not None]
        if not objections:
            return False
        entry.state, entry.captured = _State.REFUSED, None
        self.counts["refused"] += 1
        self.counts["why"] = self.counts["why"] or objections[0]
        return True


def _has_slots(request: ForwardRequest, width: int) -> bool:
    """Return whether a request can be captured as a forward of `width` tokens."""
    return isinstance(request.cache, StaticCache) and request.cache.has_room(width)


class _State(Enum):
    """The stage of a key's graph."""

    NEW = auto()  # uses are counted
    CAPTURED = auto()  # not verified yet
    REPLAYED = auto()
    REFUSED = auto()


class _GraphKey:
    """Forwards of one model on the same caches, with the same tokens and rows per sequence."""

    def __init__(self, requests: Sequence[ForwardRequest], width: int, rows: int):
        model = requests[0].model
        assert isinstance(model, Transformer)
        self.model = model
        self.width, self.rows = width, rows
        self.state = _State.NEW
        self.captured: _CapturedGraph | None = None
        self.uses = 0

    def split_logits(self, logits: Tensor, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Split logits, (rows, V) of each sequence, into those that each request needs."""
        own = logits.split(self.rows)
        return [part[-request.rows :] for part, request in zip(own, requests, strict=True)]


class _CapturedGraph:
    """A forward in static shapes, with input buffers at the addresses that its graph reads."""

    def __init__(self, entry: _GraphKey, requests: Sequence[ForwardRequest]):
        self._caches = [request.cache for request in requests]
        self._lengths = [cache.length for cache in self._caches]
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

    @property
    def is_at_other_length(self) -> bool:
        """Return whether every sequence has another length than at capture."""
        lengths = [cache.length for cache in self._caches]
        return all(now != captured for now, captured in zip(lengths, self._lengths, strict=True))

    def prepare(self, requests: Sequence[ForwardRequest]) -> None:
        """Write the next forward's input, after the caches' present content, to its buffers."""
        for index, (static, buffer, request) in enumerate(
            zip(self._static, self._tokens, requests, strict=True)
        ):
            static.prepare()
            count = len(request.tokens)
            buffer[:count].copy_(request.tokens)
            if len(requests) > 1:
                self._ends[index].fill_(index * len(buffer) + count)

    def erase(self) -> None:
        """Zero the first layer's slots that the forward writes its KV to."""
        for static in self._static:
            static.rows().zero_()

    def written_kv(self) -> Tensor:
        """Return a copy of the KV in these slots."""
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
