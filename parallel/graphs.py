"""CUDA graphs: short passes are recorded once and replayed, each one launch where a pass of a 7B
model is hundreds.

Recording follows gpt-fast and torch's notes on CUDA graphs: inputs and results stay at fixed
addresses, and a warm-up runs first. A recording is compared before it is trusted, at another length
of the text than the one it was made at. A pass that cannot be recorded, or whose recording differs,
goes on as it is. All ranks decide so together: a collective is replayed by all or by none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.cache import Cache
from offload.errors import TierForceError
from offload.fixed_shape import FixedPass, SlotCache
from parallel.sizes import MAX_GRAPH_TOKENS

if TYPE_CHECKING:  # a group holds a recorder
    from parallel.group import Group
    from parallel.model import Llama

USES = 16  # passes of one kind before it is recorded: rare kinds do not pay for it
# how far results may be from those they are compared with, as a share of the largest value
_SAME = 0.01  # a replay's logits, and the KV it writes, from those of the launches it recorded
_ALIKE = 0.05  # the logits of those launches from those of the ordinary pass, with other kernels


class Recorder:
    """The maker of CUDA graphs on one device; on a CPU there is nothing to record."""

    def __init__(self, device: torch.device):
        self.device = device
        # why nothing more can be recorded: a capture that fails leaves torch's state in doubt
        self.broken: str | None = None
        self._stream: Any = None  # one for all: cuBLAS keeps memory for each that it has met

    def pool(self) -> Any:
        """Return a handle of memory for recordings; None where there are none.

        It is good as long as one of its recordings is there, or none was made.
        """
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def record(self, function: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
        """Return what does the same as `function` each time it is called.

        On a GPU that is the replay of one CUDA graph, collectives included, which writes its result
        to the same place each time; elsewhere it is the function itself. The function must have run
        before. Raises RuntimeError for what cannot be captured.
        """
        if self.device.type != "cuda":
            return function
        self._stream = self._stream or torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        stream_before = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(
                graph,
                pool=pool,
                stream=self._stream,
                # other threads, such as NCCL's watchdog, may call what a capture must not
                capture_error_mode="thread_local",
            ):
                out = function()
        except BaseException as error:
            torch.cuda.set_stream(stream_before)  # which a failing capture does not do
            # Before torch 2.13 the allocator stays in the capture too, and frees no cached memory.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)
            self.broken = repr(error.__cause__ or error)
            raise

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


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
        replay = group.recorder.record(double, group.recorder.pool())
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
    """The runner of all passes of one text: short ones on a `SlotCache` become replays.

    Passes of one kind (cache, tokens, rows) are recorded once they have come often. `counts` says
    how many kinds are replayed, how many were refused, why the first was, and the seconds it took.
    """

    def __init__(self, enabled: bool, recorder: Recorder, uses: int | None = None):
        """Start with memory for recordings of its own.

        Args:
            enabled: whether passes are recorded; if not, all run as they are.
            recorder: the group's.
            uses: passes of a kind until it is recorded, at least 1; USES by default.
        """
        self.enabled = enabled
        self.recorder = recorder
        self.uses = USES if uses is None else uses
        self._pool = recorder.pool()  # all recordings of the text share its memory
        self.counts: dict[str, Any] = {"replayed": 0, "refused": 0, "why": None, "seconds": 0.0}
        self._kinds: dict[tuple[int, int, int], _Kind] = {}

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

    def forget(self) -> None:
        """Let go of all recordings, and of the caches they work on: the text is over."""
        self._kinds.clear()
        self._pool = self.recorder.pool()  # the old one went with its last recording

    @torch.inference_mode()
    def __call__(self, model: Llama, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Return logits (rows, V) of the last `rows` of tokens (T,), behind the cache's content."""
        if not (self.enabled and isinstance(cache, SlotCache) and len(tokens) <= MAX_GRAPH_TOKENS):
            return model(tokens, cache, rows)
        key = (id(cache), len(tokens), rows)
        if key not in self._kinds:
            self._kinds[key] = _Kind(model, cache, rows)
        kind = self._kinds[key]
        if kind.state is _State.REPLAYED:
            return kind.recording.replay(tokens)
        started = time.perf_counter()
        logits = self._try_to_record(kind, tokens)
        if logits is None:
            return model(tokens, cache, rows)
        self.counts["seconds"] += time.perf_counter() - started
        return logits

    def _try_to_record(self, kind: _Kind, tokens: Tensor) -> Tensor | None:
        """Return this pass's logits where it served to record or to compare; else None."""
        kind.uses += 1
        if kind.state is _State.NEW and kind.uses == self.uses:
            return self._record(kind, tokens)
        if kind.state is _State.RECORDED and kind.cache.length != kind.recording.made_at:
            return self._compare(kind, tokens)
        return None

    def _record(self, kind: _Kind, tokens: Tensor) -> Tensor | None:
        if self._any_objection(kind, self.recorder.broken):  # before anyone captures in vain
            return None
        kind.recording = recording = _Recording(kind, len(tokens))
        logits = recording.launch(tokens)  # the run that a capture wants before it
        objection = None
        try:
            recording.graph = self.recorder.record(recording.run, self._pool)
        except (RuntimeError, TierForceError) as error:  # whatever cannot be captured here
            objection = repr(error.__cause__ or error)
        if not self._any_objection(kind, objection):
            kind.state = _State.RECORDED
        return logits

    def _compare(self, kind: _Kind, tokens: Tensor) -> Tensor:
        """Trust the recording, or refuse it; return the logits of the pass as it is.

        A replay must do what the launches it recorded do, and these what the ordinary pass does.
        """
        recording = kind.recording
        recording.prepare(tokens)
        kv = recording.fixed_pass.rows()
        kv.zero_()  # so that it shows what a replay writes elsewhere
        replayed, replayed_kv = recording.graph().clone(), kv.clone()
        launched, launched_kv = recording.launch(tokens), kv.clone()
        logits = kind.model(tokens, kind.cache, kind.rows)
        same = _difference(replayed, launched)
        same_kv = _difference(replayed_kv, launched_kv)
        alike = _difference(launched, logits)
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
        kind.state = _State.REFUSED
        self.counts["refused"] += 1
        self.counts["why"] = self.counts["why"] or objections[0]
        return True


class _State(Enum):
    """How far a kind of passes has come."""

    NEW = auto()  # counted
    RECORDED = auto()  # to be compared before it is trusted
    REPLAYED = auto()
    REFUSED = auto()  # keeps its recording all the same: others share that memory


class _Kind:
    """Passes of as many tokens and rows, of one model on one cache."""

    recording: _Recording  # from the state RECORDED on

    def __init__(self, model: Llama, cache: SlotCache, rows: int):
        self.model = model
        self.cache = cache
        self.rows = rows
        self.state = _State.NEW
        self.uses = 0


class _Recording:
    """A pass in fixed shapes, whose input lies where the graph looks for it."""

    def __init__(self, kind: _Kind, tokens: int):
        self.made_at = kind.cache.length
        self.fixed_pass = FixedPass(kind.cache, tokens)
        self._tokens = torch.zeros(tokens, dtype=torch.int64, device=kind.model.group.device)
        # a partial, for a method would tie this to itself, and keep memory after the text
        self.run: Callable[[], Tensor] = partial(
            kind.model, self._tokens, self.fixed_pass, kind.rows
        )
        self.graph: Callable[[], Tensor] = self.run

    def prepare(self, tokens: Tensor) -> None:
        """Put the input of the next pass, behind what the cache holds now, in its place."""
        self.fixed_pass.prepare()
        self._tokens.copy_(tokens)

    def launch(self, tokens: Tensor) -> Tensor:
        """Return the logits of the pass in fixed shapes, launched by the host."""
        self.prepare(tokens)
        return self.run().clone()

    def replay(self, tokens: Tensor) -> Tensor:
        """Return the logits of the recording."""
        self.prepare(tokens)
        return self.graph().clone()  # the next replay writes where this one did


def _difference(x: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest wanted value."""
    return float((x - wanted).abs().max() / wanted.abs().max())
