"""CUDA graphs: short forwards are captured once and replayed with one launch; a forward of a 7B
model takes hundreds.

Capture follows gpt-fast and torch's notes on CUDA graphs: inputs and results stay at fixed
addresses, and a warm-up runs first. A graph is compared with the launches it captured before its
first use. A forward that cannot be captured, or whose graph gives other results, runs eagerly. All
ranks decide together: a collective is replayed by all or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.cache.base import Cache
from offload.cache.static_forward import Place, StaticForward
from offload.cache.static_shape import StaticCache
from offload.errors import TierForceError
from parallel.config.parameter_count import MAX_GRAPH_TOKENS, MAX_STATIC_TOKENS
from parallel.execution.batched_forward import ForwardRequest, forward_steps, run_forward
from parallel.model.pipeline import LayerSteps
from parallel.model.transformer import Transformer
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.process_group import TensorParallelGroup

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
    """Runs forwards, and replays those that were captured on the caches of the engine's slots.

    A slot is the place of one sequence at a time: a `StaticCache` for each model, which the next
    sequence reuses. So a slot's forwards are captured once, before its first sequence: each
    model's, on its cache alone and shared with the slots before it. A forward that was not captured
    with its own slots and number of tokens is padded to the next that was, or runs eagerly.

    The driver keeps a graph's launches in device memory, outside torch's allocator. No more are
    captured once they have `max_bytes` of it, or half of that for those that slots share. So the
    last one may exceed it.

    `counts` holds how many kinds of forwards are replayed, how many were refused, why the first
    was or why no more are captured, the seconds spent, and the bytes of all launches.
    """

    def __init__(self, enabled: bool, capturer: GraphCapturer, max_bytes: float = inf):
        """Start without captured graphs; if not `enabled`, all forwards run eagerly."""
        self.enabled, self.max_bytes = enabled, max_bytes
        self.capturer = capturer
        self.counts: dict[str, Any] = {
            "replayed": 0,
            "refused": 0,
            "why": None,
            "seconds": 0.0,
            "bytes": 0,
        }
        self._forwards: dict[Transformer, _SlotForwards] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the graphs' launches."""
        return sum(forwards.nbytes for forwards in self._forwards.values())

    @property
    def report(self) -> dict[str, Any] | None:
        """The live `counts`; None if all forwards run eagerly."""
        return self.counts if self.enabled else None

    def __call__(self, model: Transformer, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Return logits (rows, V) of the last `rows` of tokens (T,), after the cache's content."""
        (logits,) = self.run([ForwardRequest(model, cache, tokens, rows)])
        return logits

    @torch.inference_mode()
    def run(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Run requests of one model, on caches of several sequences, as one forward.

        Returns the logits of each. All ranks of the model call it with the same requests.
        """
        captured = self._captured(requests)
        return run_forward(requests) if captured is None else captured.replay(requests)

    def steps(self, requests: Sequence[ForwardRequest]) -> LayerSteps[list[Tensor]]:
        """Run requests like `run`, layer by layer, in inference mode; a graph is one step."""
        captured = self._captured(requests)
        if captured is not None:
            return captured.replay(requests)
        return (yield from forward_steps(requests))

    @torch.inference_mode()
    def capture(
        self, model: Transformer, cache: StaticCache, sizes: Sequence[int], slot: int = 0
    ) -> None:
        """Capture the short forwards on a slot's cache that were not captured yet.

        All ranks of the model call it before the slot's next sequence.

        Args:
            model: the model of these forwards.
            cache: the slot's cache for this model. It is empty, and its content is overwritten. If
                it is another one than before, the graphs on that one are freed.
            sizes: numbers of tokens per sequence that are captured, up to MAX_GRAPH_TOKENS.
            slot: index of the slot.
        """
        if not self.enabled:
            return
        started = time.perf_counter()
        forwards = self._forwards.setdefault(model, _SlotForwards())
        forwards.set_cache(slot, cache)
        shared = tuple(range(slot + 1))
        for slots, tokens in product(dict.fromkeys(((slot,), shared)), sizes):
            is_short = tokens <= MAX_GRAPH_TOKENS and len(slots) * tokens <= MAX_STATIC_TOKENS
            if is_short and _has_two_places(cache, tokens) and forwards.lacks(slots, tokens):
                self._capture(model, forwards, slots, tokens, cache)
        self.counts["seconds"] += time.perf_counter() - started
        self.counts["bytes"] = self.nbytes

    def release(self, cache: StaticCache) -> None:
        """Free the graphs on a cache, and forget it."""
        for forwards in self._forwards.values():
            forwards.release(cache)
        self.counts["bytes"] = self.nbytes

    def _captured(self, requests: Sequence[ForwardRequest]) -> _CapturedForward | None:
        model = requests[0].model
        forwards = self._forwards.get(model) if isinstance(model, Transformer) else None
        return forwards.find(requests) if forwards else None

    def _capture(
        self,
        model: Transformer,
        forwards: _SlotForwards,
        slots: tuple[int, ...],
        tokens: int,
        empty: StaticCache,
    ) -> None:
        """Capture a forward and compare it with its launches, unless a rank objects."""
        gather, nbytes, full = model.group.gather, self.nbytes, None
        if nbytes >= (self.max_bytes if len(slots) == 1 else self.max_bytes / 2):
            full = f"others have {nbytes / 1e6:.0f} MB of device memory, as much as graphs may have"
        if any(is_full := gather(full)):  # captured for a later sequence, if graphs are freed
            if len(slots) == 1:
                reasons = (each for each in is_full if each is not None)
                self.counts["why"] = self.counts["why"] or next(reasons)
            return
        captured, objection = None, self.capturer.broken
        if objection is None:
            try:  # allocates, and tests kernels
                out = forwards.output_buffer(model, len(slots))
                captured = _CapturedForward(model, forwards.caches(slots), tokens, out)
            except (RuntimeError, TierForceError) as error:
                objection = repr(error)
        # before any rank captures in vain, or waits for another one's collectives
        if self._is_refused(gather(objection)) or captured is None:
            forwards.captured[slots, tokens] = None
            return
        # The warm-up that a capture needs. Its errors are no objections: collectives have run.
        captured.launch(empty)
        before, objection = self.capturer.driver_bytes(), None
        try:
            captured.graph = self.capturer.capture(captured.run)
        except (RuntimeError, TierForceError) as error:  # an operation that cannot be captured
            objection = repr(error.__cause__ or error)
        # before any rank replays a collective, all have captured it
        is_refused = self._is_refused(gather(objection)) or self._is_refused(
            gather(captured.difference(empty))
        )
        captured.nbytes = max(0, self.capturer.driver_bytes() - before)
        forwards.captured[slots, tokens] = None if is_refused else captured
        self.counts["replayed"] += not is_refused

    def _is_refused(self, gathered: Sequence[str | None]) -> bool:
        """Return whether any rank of the model objects to a graph."""
        objections = [reason for reason in gathered if reason is not None]
        if not objections:
            return False
        if self.counts["refused"] == 0:  # else it says why the first one was
            self.counts["why"] = objections[0]
        self.counts["refused"] += 1
        return True


class _SlotForwards:
    """The captured forwards of one model."""

    def __init__(self) -> None:
        self._caches: dict[int, StaticCache] = {}  # slot -> cache
        # (slots, tokens of each) -> forward; None if it was refused
        self.captured: dict[tuple[tuple[int, ...], int], _CapturedForward | None] = {}
        self._outputs: dict[int, Tensor] = {}  # rows -> logits

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the graphs' launches."""
        return sum(each.nbytes for each in self.captured.values() if each is not None)

    def output_buffer(self, model: Transformer, slots: int) -> Tensor:
        """Return where the graphs of one slot, or of several, leave their logits (rows, V).

        No two are replayed at the same time. With one of its own, each would keep it.
        """
        rows = MAX_GRAPH_TOKENS if slots == 1 else MAX_STATIC_TOKENS
        if rows not in self._outputs:
            device, vocab = model.embed.weight.device, model.config.vocab
            self._outputs[rows] = torch.empty(rows, vocab, device=device)
        return self._outputs[rows]

    def set_cache(self, slot: int, cache: StaticCache) -> None:
        """Set a slot's cache, and free the graphs on another one that it had."""
        previous = self._caches.get(slot)
        if previous is not cache and previous is not None:
            self.release(previous)
        self._caches[slot] = cache

    def release(self, cache: StaticCache) -> None:
        """Free the graphs on a cache, and forget it."""
        released = {slot for slot, each in self._caches.items() if each is cache}
        for slot in released:
            del self._caches[slot]
        for key in [key for key in self.captured if not released.isdisjoint(key[0])]:
            del self.captured[key]

    def caches(self, slots: Sequence[int]) -> list[StaticCache]:
        """Return the caches of these slots, but for those that have none."""
        return [self._caches[slot] for slot in slots if slot in self._caches]

    def lacks(self, slots: tuple[int, ...], tokens: int) -> bool:
        """Return whether a forward was not captured, and could be."""
        return len(self.caches(slots)) == len(slots) and (slots, tokens) not in self.captured

    def find(self, requests: Sequence[ForwardRequest]) -> _CapturedForward | None:
        """Return the smallest captured forward that has room for the requests, if there is one."""
        caches = [request.cache for request in requests]
        slots = {slot for slot, cache in self._caches.items() if cache in caches}
        width = max(len(request.tokens) for request in requests)
        fitting = [
            (len(each), tokens, captured)
            for (each, tokens), captured in self.captured.items()
            if captured is not None and tokens >= width and slots.issubset(each)
        ]
        if len(slots) < len(caches) or not fitting or not all(map(_has_room, requests)):
            return None
        _, _, captured = min(fitting, key=itemgetter(0, 1))
        return captured


class _CapturedForward:
    """A forward in static shapes on the caches of some slots, with `tokens` tokens on each.

    Its inputs are at the addresses that its graph reads. `nbytes`: device memory of its launches.
    """

    nbytes = 0

    def __init__(self, model: Transformer, caches: Sequence[StaticCache], tokens: int, out: Tensor):
        self._width = tokens
        self._static = StaticForward(caches, tokens)
        device = model.embed.weight.device
        self._tokens = torch.zeros(len(caches) * tokens, dtype=torch.int64, device=device)
        # A partial: a bound method would make a reference cycle, which would outlive the caches.
        self.run: Callable[[], Tensor] = partial(_logits, model, self._tokens, self._static, out)
        self.graph: Callable[[], Tensor] = self.run

    def replay(self, requests: Sequence[ForwardRequest]) -> list[Tensor]:
        """Return the logits (rows, V) of each request by replaying the graph."""
        by_cache = {id(request.cache): request for request in requests}
        own: dict[int, slice] = {}  # cache -> rows of its tokens
        for index, cache in enumerate(self._static.caches):
            request = by_cache.get(id(cache))
            if request is None:
                self._static.place(index, Place(0))
                continue
            first = index * self._width
            rows = own[id(cache)] = slice(first, first + len(request.tokens))
            self._static.place(index, Place.after(cache, len(request.tokens)))
            self._tokens[rows].copy_(request.tokens)
        logits = self.graph()
        # copies: the next replay overwrites them
        ends = [(own[id(each.cache)].stop, each.rows) for each in requests]
        return [logits[end - rows : end].clone() for end, rows in ends]

    def launch(self, empty: StaticCache) -> None:
        """Launch the forward on a cache that is empty, and leave those of other slots as they are.

        It is captured like this.
        """
        for index, cache in enumerate(self._static.caches):
            place = Place(self._width if cache is empty else 0, slot=cache.window_offset)
            self._static.place(index, place)
        self.run()

    def difference(self, empty: StaticCache) -> str | None:
        """Return how a replay differs from the launches that were captured, None if it does not.

        It gets other tokens, in other slots and at other positions than those of the capture, and
        padding after them: what is baked in shows.
        """
        width = self._width
        index, rows = self._static.caches.index(empty), max(1, width - 1)
        last = Place(width, slot=empty.slots - width)
        position = empty.rotary.length - width
        place = Place(rows, position, last.slot, position, first_valid_slot=1)
        self._static.place(index, place)
        self._tokens.fill_(1)
        written = self._static.written(index, last)
        own = slice(index * width, index * width + rows)
        hidden = empty.hidden_states
        before = None if hidden is None else hidden.states.clone()

        def results(run: Callable[[], Tensor]) -> dict[str, Tensor]:
            # Zeros reveal a replay that writes its KV elsewhere, or padding there. Other slots'
            # results are not compared: their sequences need not be finite.
            written.zero_()
            found = {"logits": run()[own].clone(), "written KV": written.clone()}
            if hidden is not None and before is not None:
                found["hidden states"] = hidden.states[:-1].clone()  # the last row is padding
                hidden.states.copy_(before)
            return found

        replayed, launched = results(self.graph), results(self.run)
        errors = {what: _difference(each, launched[what]) for what, each in replayed.items()}
        if all(error <= _TOLERANCE for error in errors.values()):  # false if one is NaN
            return None
        return "replayed " + ", ".join(f"{what} off by {by:.2g}" for what, by in errors.items())


def _has_room(request: ForwardRequest) -> bool:
    assert isinstance(request.cache, StaticCache)
    return request.cache.has_room(len(request.tokens))


def _has_two_places(cache: StaticCache, tokens: int) -> bool:
    """Return whether so many tokens fit in two places: a graph is compared in the second."""
    return tokens < min(cache.slots - cache.window_offset, cache.rotary.length)


@torch.inference_mode()
def _logits(model: Transformer, tokens: Tensor, static: StaticForward, out: Tensor) -> Tensor:
    """Run the tokens of all sequences in one forward; return their logits (all T, V), in `out`."""
    logits = model(tokens, static, len(tokens))
    return out[: len(logits)].copy_(logits)


def _difference(x: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((x - expected).abs().max() / expected.abs().max())
