"""CUDA graphs: short passes are recorded once and replayed, each one launch where a pass of a 7B
model is hundreds.

Recording follows gpt-fast and torch's notes on CUDA graphs: inputs and results stay at fixed
addresses, and a warm-up runs first. A graph is compared before it is trusted, at another length
of the text than the one it was made at. A pass that cannot be recorded, or whose recording differs,
goes on as it is. All ranks decide so together: a collective is replayed by all or by none.
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

USES = 16  # passes of one kind before it is recorded: rare kinds do not pay for it
# recordings on a device from which no more shared passes are recorded, which come in many kinds:
# each holds its launches and logits in device memory
MAX_GRAPHS = 48
# how far results may be from those they are compared with, as a share of the largest value
_REPLAY_TOLERANCE = (
    0.01  # a replay's logits, and the KV it writes, from those of the launches it recorded
)
_STATIC_TOLERANCE = (
    0.05  # the logits of those launches from those of the ordinary pass, with other kernels
)


def cuda_graphs_supported(group: TensorParallelGroup) -> bool:
    """Return whether sums over the ranks can be recorded and replayed here, by trying it.

    All ranks call it, and get the same answer.
    """
    if not all(group.gather(_may_work(group))):
        return False
    x = torch.ones(8, device=group.device)
    replay = None

    def double() -> Tensor:
        return group.all_reduce(x * 2)

    with suppress(RuntimeError, TierForceError):
        double()
        replay = group.graph_capturer.capture(double)
    everywhere = all(group.gather(replay is not None))  # before anyone replays a collective
    if replay is None or not everywhere:
        return False
    right = False
    with suppress(RuntimeError, TierForceError):
        x.fill_(3.0)
        right = bool((replay() == 6 * group.size).all())
    return all(group.gather(right))


def _may_work(group: TensorParallelGroup) -> bool:
    if group.device.type != "cuda":
        return False
    return group.size == 1 or "cuda:nccl" in str(dist.get_backend_config())


class GraphRunner:
    """The runner of a text's passes, and of those that others share: short ones become replays.

    That takes a `StaticCache`. Passes of one kind (caches, tokens, rows) are recorded once they have
    come often. `counts` says how many kinds are replayed, how many were refused, why the first was,
    and the seconds it took.
    """

    def __init__(self, enabled: bool, recorder: GraphCapturer, uses: int | None = None):
        """Start without recordings.

        Args:
            enabled: whether passes are recorded; if not, all run as they are.
            recorder: the group's.
            uses: passes of a kind until it is recorded, at least 1; USES by default.
        """
        self.enabled = enabled
        self.recorder = recorder
        self.uses = USES if uses is None else uses
        self.counts: dict[str, Any] = {"replayed": 0, "refused": 0, "why": None, "seconds": 0.0}
        self._keys: dict[tuple[int, ...], _GraphKey] = {}  # by tokens, rows, and the caches' ids

    @property
    def report(self) -> dict[str, Any] | None:
        """`counts`, as they grow; None where passes run as they are."""
        return self.counts if self.enabled else None

    def warm_up(self, model: Transformer, tokens: Tensor, cache: StaticCache, rows: int) -> None:
        """Run such passes until they are replayed, or refused; leave the cache where it stood."""
        if not self.enabled:
            return
        for _ in range(self.uses):
            self(model, tokens, cache, rows)
        cache.advance(1)
        self(model, tokens, cache, rows)
        cache.crop(cache.length - 1)

    def evict(self, caches: Iterable[Cache] | None = None) -> None:
        """Let go of all recordings that work on any of these caches, by default of all of them.

        The text that they are of is over.
        """
        if caches is None:
            self._keys.clear()
            return
        over = {id(cache) for cache in caches}
        for key in list(self._keys):
            if not over.isdisjoint(key[2:]):
                del self._keys[key]

    def __call__(self, model: Transformer, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Return logits (rows, V) of the last `rows` of tokens (T,), behind the cache's content."""
        (logits,) = self.run([ForwardRequest(model, cache, tokens, rows)])
        return logits

    @torch.inference_mode()
    def run(self, passes: Sequence[ForwardRequest]) -> list[Tensor]:
        """Make passes of one model, on caches of several texts, as one; return the logits of each.

        All ranks of the model call it with the same. Where texts share a graph, all of them
        read as many tokens, so that there are few kinds: behind those that are asked for come
        others, which count for nothing.
        """
        width = max(len(asked.tokens) for asked in passes)
        rows = max(asked.rows for asked in passes)
        is_short = width <= MAX_GRAPH_TOKENS and len(passes) * width <= MAX_STATIC_TOKENS
        if not (self.enabled and is_short and all(_has_slots(asked, width) for asked in passes)):
            return run_forward(passes)
        key = (width, rows, *(id(asked.cache) for asked in passes))
        if key not in self._keys:
            self._keys[key] = _GraphKey(passes, width, rows)
        kind = self._keys[key]
        if kind.state is _State.REPLAYED:
            assert kind.captured is not None
            return kind.parts(kind.captured.replay(passes), passes)
        started = time.perf_counter()
        logits = self._try_capture(kind, passes)
        if logits is None:
            return run_forward(passes)
        self.counts["seconds"] += time.perf_counter() - started
        return logits

    def _try_capture(
        self, kind: _GraphKey, passes: Sequence[ForwardRequest]
    ) -> list[Tensor] | None:
        """Return this pass's logits where it served to record or to compare; else None."""
        kind.uses += 1
        if kind.state is _State.NEW and kind.uses % self.uses == 0:
            return self._capture(kind, passes)
        captured = kind.captured
        if kind.state is _State.CAPTURED and captured is not None and captured.is_at_other_length:
            return self._compare(kind, captured, passes)
        return None

    def _capture(self, kind: _GraphKey, passes: Sequence[ForwardRequest]) -> list[Tensor] | None:
        is_full = self.recorder.count >= MAX_GRAPHS
        if len(passes) > 1 and any(kind.model.group.gather(is_full)):
            return None  # until texts that are over make room
        if self._is_refused(kind, self.recorder.broken):  # before anyone captures in vain
            return None
        captured = _CapturedGraph(kind, passes)
        logits = captured.launch(passes)  # the run that a capture wants before it
        objection = None
        try:
            captured.graph = self.recorder.capture(captured.run)
        except (RuntimeError, TierForceError) as error:  # whatever cannot be captured here
            objection = repr(error.__cause__ or error)
        if not self._is_refused(kind, objection):
            kind.state, kind.captured = _State.CAPTURED, captured
        return kind.parts(logits, passes)

    def _compare(
        self, kind: _GraphKey, captured: _CapturedGraph, passes: Sequence[ForwardRequest]
    ) -> list[Tensor]:
        """Trust the graph, or refuse it; return the logits of the pass as it is.

        A replay must do what the launches it recorded do, and these what the ordinary pass does.
        """
        captured.prepare(passes)
        captured.erase()  # so that it shows what a replay writes elsewhere
        replayed, replayed_kv = captured.graph().clone(), captured.written_kv()
        launched, launched_kv = captured.launch(passes), captured.written_kv()
        logits = run_forward(passes)
        same = _difference(replayed, launched)
        same_kv = _difference(replayed_kv, launched_kv)
        alike = _difference(torch.cat(kind.parts(launched, passes)), torch.cat(logits))
        objection = None
        if not (
            same <= _REPLAY_TOLERANCE
            and same_kv <= _REPLAY_TOLERANCE
            and alike <= _STATIC_TOLERANCE
        ):  # also where one is NaN
            objection = (
                f"off by {same:.2g}, in what it keeps by {same_kv:.2g}, "
                f"and its launches by {alike:.2g}"
            )
        if not self._is_refused(kind, objection):
            kind.state = _State.REPLAYED
            self.counts["replayed"] += 1
        return logits

    def _is_refused(self, kind: _GraphKey, objection: str | None) -> bool:
        """Return whether any rank of the model objects to this recording; if so, it is refused."""
        objections = [each for each in kind.model.group.gather(objection) if each is not None]
        if not objections:
            return False
        kind.state, kind.captured = _State.REFUSED, None
        self.counts["refused"] += 1
        self.counts["why"] = self.counts["why"] or objections[0]
        return True


def _has_slots(asked: ForwardRequest, width: int) -> bool:
    """Return whether a pass can be recorded, as one of `width` tokens."""
    return isinstance(asked.cache, StaticCache) and asked.cache.has_room(width)


class _State(Enum):
    """How far a kind of passes has come."""

    NEW = auto()  # counted
    CAPTURED = auto()  # to be compared before it is trusted
    REPLAYED = auto()
    REFUSED = auto()


class _GraphKey:
    """Passes of as many tokens and rows of each text, of one model on the same caches."""

    def __init__(self, passes: Sequence[ForwardRequest], width: int, rows: int):
        model = passes[0].model
        assert isinstance(model, Transformer)
        self.model = model
        self.width, self.rows = width, rows
        self.state = _State.NEW
        self.captured: _CapturedGraph | None = None
        self.uses = 0

    def parts(self, logits: Tensor, passes: Sequence[ForwardRequest]) -> list[Tensor]:
        """Return of logits, (rows, V) of each text, what each pass asks for."""
        own = logits.split(self.rows)
        return [part[-asked.rows :] for part, asked in zip(own, passes, strict=True)]


class _CapturedGraph:
    """A pass in fixed shapes, whose input lies where the graph looks for it."""

    def __init__(self, kind: _GraphKey, passes: Sequence[ForwardRequest]):
        self._caches = [asked.cache for asked in passes]
        self._made_at = [cache.length for cache in self._caches]
        self._fixed = [_static_forward(asked, kind.width) for asked in passes]
        self._tokens = [asked.tokens.new_zeros(kind.width) for asked in passes]
        # where the tokens that count end, of all texts one behind the other
        self._ends = self._tokens[0].new_zeros(len(passes))
        # partials, for a method would tie this to itself, and keep memory after the text
        self.run: Callable[[], Tensor]
        if len(passes) == 1:
            self.run = partial(kind.model, self._tokens[0], self._fixed[0], kind.rows)
        else:
            before = torch.arange(-kind.rows, 0, device=self._ends.device)
            self.run = partial(
                _logits_before, kind.model, self._tokens, self._fixed, self._ends, before
            )
        self.graph: Callable[[], Tensor] = self.run

    @property
    def is_at_other_length(self) -> bool:
        """Return whether every text stands elsewhere than where this was made."""
        lengths = [cache.length for cache in self._caches]
        return all(now != then for now, then in zip(lengths, self._made_at, strict=True))

    def prepare(self, passes: Sequence[ForwardRequest]) -> None:
        """Put the input of the next pass, behind what the caches hold now, in its place."""
        for index, (fixed, place, asked) in enumerate(
            zip(self._fixed, self._tokens, passes, strict=True)
        ):
            fixed.prepare()
            count = len(asked.tokens)
            place[:count].copy_(asked.tokens)
            if len(passes) > 1:
                self._ends[index].fill_(index * len(place) + count)

    def erase(self) -> None:
        """Write zeros where the pass is to keep its KV, in the first layer."""
        for fixed in self._fixed:
            fixed.rows().zero_()

    def written_kv(self) -> Tensor:
        """Return a copy of what is there."""
        return torch.cat([fixed.rows().flatten() for fixed in self._fixed])

    def launch(self, passes: Sequence[ForwardRequest]) -> Tensor:
        """Return the logits of the pass in fixed shapes, launched by the host: (R, V) of all."""
        self.prepare(passes)
        return self.run().clone()

    def replay(self, passes: Sequence[ForwardRequest]) -> Tensor:
        """Return the logits of the replayed graph."""
        self.prepare(passes)
        return self.graph().clone()  # the next replay writes where this one did


def _static_forward(asked: ForwardRequest, width: int) -> StaticForward:
    assert isinstance(asked.cache, StaticCache)
    return StaticForward(asked.cache, width)


@torch.inference_mode()
def _logits_before(
    model: Transformer,
    tokens: Sequence[Tensor],
    caches: Sequence[StaticForward],
    ends: Tensor,
    before: Tensor,
) -> Tensor:
    """Read tokens (T,) of each text in one pass; return logits, (rows, V) of each.

    They are of the rows `before` (rows,) each of the `ends` (texts,), which are in device memory.
    """
    x = batched_hidden_states(model, tokens, caches)
    at = (ends[:, None] + before).flatten()
    # of a text that reads fewer than are asked of others, the first may be before its own
    return model.logits(x.index_select(0, at.clamp(min=0)))


def _difference(x: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest wanted value."""
    return float((x - wanted).abs().max() / wanted.abs().max())
