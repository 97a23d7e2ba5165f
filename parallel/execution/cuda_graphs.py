"""CUDA graphs: short passes are recorded once and replayed, each one launch where a pass of a 7B
model is hundreds.

Recording follows gpt-fast and torch's notes on CUDA graphs: inputs and results stay at fixed
addresses, and a warm-up runs first. A recording is compared before it is trusted, at another length
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
from offload.cache.static_shape import FixedPass, SlotCache
from offload.errors import TierForceError
from parallel.config.parameter_count import MAX_FIXED_TOKENS, MAX_GRAPH_TOKENS
from parallel.execution.batched_forward import Pass, make, read_together
from parallel.model.transformer import Llama
from parallel.ranks.graph_capture import Recorder
from parallel.ranks.process_group import Group

USES = 16  # passes of one kind before it is recorded: rare kinds do not pay for it
# recordings on a device from which no more shared passes are recorded, which come in many kinds:
# each holds its launches and logits in device memory
MOST_RECORDINGS = 48
# how far results may be from those they are compared with, as a share of the largest value
_SAME = 0.01  # a replay's logits, and the KV it writes, from those of the launches it recorded
_ALIKE = 0.05  # the logits of those launches from those of the ordinary pass, with other kernels


def graphs_work(group: Group) -> bool:
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
        replay = group.recorder.record(double)
    everywhere = all(group.gather(replay is not None))  # before anyone replays a collective
    if replay is None or not everywhere:
        return False
    right = False
    with suppress(RuntimeError, TierForceError):
        x.fill_(3.0)
        right = bool((replay() == 6 * group.size).all())
    return all(group.gather(right))


def _may_work(group: Group) -> bool:
    if group.device.type != "cuda":
        return False
    return group.size == 1 or "cuda:nccl" in str(dist.get_backend_config())


class GraphRunner:
    """The runner of a text's passes, and of those that others share: short ones become replays.

    That takes a `SlotCache`. Passes of one kind (caches, tokens, rows) are recorded once they have
    come often. `counts` says how many kinds are replayed, how many were refused, why the first was,
    and the seconds it took.
    """

    def __init__(self, enabled: bool, recorder: Recorder, uses: int | None = None):
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
        self._kinds: dict[tuple[int, ...], _Kind] = {}  # by tokens, rows, and the caches' ids

    @property
    def report(self) -> dict[str, Any] | None:
        """`counts`, as they grow; None where passes run as they are."""
        return self.counts if self.enabled else None

    def warm(self, model: Llama, tokens: Tensor, cache: SlotCache, rows: int) -> None:
        """Run such passes until they are replayed, or refused; leave the cache where it stood."""
        if not self.enabled:
            return
        for _ in range(self.uses):
            self(model, tokens, cache, rows)
        cache.advance(1)
        self(model, tokens, cache, rows)
        cache.crop(cache.length - 1)

    def forget(self, caches: Iterable[Cache] | None = None) -> None:
        """Let go of all recordings that work on any of these caches, by default of all of them.

        The text that they are of is over.
        """
        if caches is None:
            self._kinds.clear()
            return
        over = {id(cache) for cache in caches}
        for key in list(self._kinds):
            if not over.isdisjoint(key[2:]):
                del self._kinds[key]

    def __call__(self, model: Llama, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Return logits (rows, V) of the last `rows` of tokens (T,), behind the cache's content."""
        (logits,) = self.make([Pass(model, cache, tokens, rows)])
        return logits

    @torch.inference_mode()
    def make(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Make passes of one model, on caches of several texts, as one; return the logits of each.

        All ranks of the model call it with the same. Where texts share a recording, all of them
        read as many tokens, so that there are few kinds: behind those that are asked for come
        others, which count for nothing.
        """
        width = max(len(asked.tokens) for asked in passes)
        rows = max(asked.rows for asked in passes)
        is_short = width <= MAX_GRAPH_TOKENS and len(passes) * width <= MAX_FIXED_TOKENS
        if not (self.enabled and is_short and all(_has_slots(asked, width) for asked in passes)):
            return make(passes)
        key = (width, rows, *(id(asked.cache) for asked in passes))
        if key not in self._kinds:
            self._kinds[key] = _Kind(passes, width, rows)
        kind = self._kinds[key]
        if kind.state is _State.REPLAYED:
            assert kind.recording is not None
            return kind.parts(kind.recording.replay(passes), passes)
        started = time.perf_counter()
        logits = self._try_to_record(kind, passes)
        if logits is None:
            return make(passes)
        self.counts["seconds"] += time.perf_counter() - started
        return logits

    def _try_to_record(self, kind: _Kind, passes: Sequence[Pass]) -> list[Tensor] | None:
        """Return this pass's logits where it served to record or to compare; else None."""
        kind.uses += 1
        if kind.state is _State.NEW and kind.uses % self.uses == 0:
            return self._record(kind, passes)
        recording = kind.recording
        if kind.state is _State.RECORDED and recording is not None and recording.is_elsewhere:
            return self._compare(kind, recording, passes)
        return None

    def _record(self, kind: _Kind, passes: Sequence[Pass]) -> list[Tensor] | None:
        is_full = self.recorder.count >= MOST_RECORDINGS
        if len(passes) > 1 and any(kind.model.group.gather(is_full)):
            return None  # until texts that are over make room
        if self._any_objection(kind, self.recorder.broken):  # before anyone captures in vain
            return None
        recording = _Recording(kind, passes)
        logits = recording.launch(passes)  # the run that a capture wants before it
        objection = None
        try:
            recording.graph = self.recorder.record(recording.run)
        except (RuntimeError, TierForceError) as error:  # whatever cannot be captured here
            objection = repr(error.__cause__ or error)
        if not self._any_objection(kind, objection):
            kind.state, kind.recording = _State.RECORDED, recording
        return kind.parts(logits, passes)

    def _compare(self, kind: _Kind, recording: _Recording, passes: Sequence[Pass]) -> list[Tensor]:
        """Trust the recording, or refuse it; return the logits of the pass as it is.

        A replay must do what the launches it recorded do, and these what the ordinary pass does.
        """
        recording.prepare(passes)
        recording.erase()  # so that it shows what a replay writes elsewhere
        replayed, replayed_kv = recording.graph().clone(), recording.kept()
        launched, launched_kv = recording.launch(passes), recording.kept()
        logits = make(passes)
        same = _difference(replayed, launched)
        same_kv = _difference(replayed_kv, launched_kv)
        alike = _difference(torch.cat(kind.parts(launched, passes)), torch.cat(logits))
        objection = None
        if not (same <= _SAME and same_kv <= _SAME and alike <= _ALIKE):  # also where one is NaN
            objection = (
                f"off by {same:.2g}, in what it keeps by {same_kv:.2g}, "
                f"and its launches by {alike:.2g}"
            )
        if not self._any_objection(kind, objection):
            kind.state = _State.REPLAYED
            self.counts["replayed"] += 1
        return logits

    def _any_objection(self, kind: _Kind, objection: str | None) -> bool:
        """Return whether any rank of the model objects to this recording; if so, it is refused."""
        objections = [each for each in kind.model.group.gather(objection) if each is not None]
        if not objections:
            return False
        kind.state, kind.recording = _State.REFUSED, None
        self.counts["refused"] += 1
        self.counts["why"] = self.counts["why"] or objections[0]
        return True


def _has_slots(asked: Pass, width: int) -> bool:
    """Return whether a pass can be recorded, as one of `width` tokens."""
    return isinstance(asked.cache, SlotCache) and asked.cache.has_room(width)


class _State(Enum):
    """How far a kind of passes has come."""

    NEW = auto()  # counted
    RECORDED = auto()  # to be compared before it is trusted
    REPLAYED = auto()
    REFUSED = auto()


class _Kind:
    """Passes of as many tokens and rows of each text, of one model on the same caches."""

    def __init__(self, passes: Sequence[Pass], width: int, rows: int):
        model = passes[0].model
        assert isinstance(model, Llama)
        self.model = model
        self.width, self.rows = width, rows
        self.state = _State.NEW
        self.recording: _Recording | None = None
        self.uses = 0

    def parts(self, logits: Tensor, passes: Sequence[Pass]) -> list[Tensor]:
        """Return of logits, (rows, V) of each text, what each pass asks for."""
        own = logits.split(self.rows)
        return [part[-asked.rows :] for part, asked in zip(own, passes, strict=True)]


class _Recording:
    """A pass in fixed shapes, whose input lies where the graph looks for it."""

    def __init__(self, kind: _Kind, passes: Sequence[Pass]):
        self._caches = [asked.cache for asked in passes]
        self._made_at = [cache.length for cache in self._caches]
        self._fixed = [_fixed(asked, kind.width) for asked in passes]
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
    def is_elsewhere(self) -> bool:
        """Return whether every text stands elsewhere than where this was made."""
        lengths = [cache.length for cache in self._caches]
        return all(now != then for now, then in zip(lengths, self._made_at, strict=True))

    def prepare(self, passes: Sequence[Pass]) -> None:
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

    def kept(self) -> Tensor:
        """Return a copy of what is there."""
        return torch.cat([fixed.rows().flatten() for fixed in self._fixed])

    def launch(self, passes: Sequence[Pass]) -> Tensor:
        """Return the logits of the pass in fixed shapes, launched by the host: (R, V) of all."""
        self.prepare(passes)
        return self.run().clone()

    def replay(self, passes: Sequence[Pass]) -> Tensor:
        """Return the logits of the recording."""
        self.prepare(passes)
        return self.graph().clone()  # the next replay writes where this one did


def _fixed(asked: Pass, width: int) -> FixedPass:
    assert isinstance(asked.cache, SlotCache)
    return FixedPass(asked.cache, width)


@torch.inference_mode()
def _logits_before(
    model: Llama,
    tokens: Sequence[Tensor],
    caches: Sequence[FixedPass],
    ends: Tensor,
    before: Tensor,
) -> Tensor:
    """Read tokens (T,) of each text in one pass; return logits, (rows, V) of each.

    They are of the rows `before` (rows,) each of the `ends` (texts,), which are in device memory.
    """
    x = read_together(model, tokens, caches)
    at = (ends[:, None] + before).flatten()
    # of a text that reads fewer than are asked of others, the first may be before its own
    return model.logits(x.index_select(0, at.clamp(min=0)))


def _difference(x: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest wanted value."""
    return float((x - wanted).abs().max() / wanted.abs().max())
