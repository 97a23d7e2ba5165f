"""Short passes recorded once and replayed: on a GPU a CUDA graph, one launch where a pass of a 7B
model is hundreds.

Recording follows gpt-fast and torch's notes on CUDA graphs: fixed addresses in and out, a warm-up
before. A recording is compared before it is trusted, where the text is longer or shorter than where
it was made. What cannot be captured, or differs, goes on as it was: on all ranks, since a
collective is replayed by all or by none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.cache import Cache
from offload.errors import TierForceError
from offload.fixed_shape import FixedPass, SlotCache
from parallel.group import Recorder
from parallel.model import Llama

# of a pass worth recording: a longest draft at the retrieval level, and what was pending
MOST_ROWS = 18
USES = 16  # passes of one kind before it is recorded: rare kinds do not pay for it
# of the largest: by how much a replay's logits, and the KV it writes, may differ from those of its
# own launches
_SAME = 0.01
_ALIKE = 0.05  # and these logits from those of the pass as it is, which other kernels compute


class Replay:
    """Calls models on the caches of one text: short passes on a `SlotCache` in fixed shapes where
    `fixed`, all else as it is.

    Kinds of passes (cache, tokens, rows) become replays when they come often. `counts` says how
    many did, how many could not, why, and the seconds it took.
    """

    def __init__(self, fixed: bool, recorder: Recorder, uses: int | None = None):
        """`uses`, at least 1: passes of a kind until it is recorded; USES by default."""
        self.fixed, self.recorder, self.uses = fixed, recorder, USES if uses is None else uses
        recorder.forget()
        self.counts: dict[str, Any] = {"replayed": 0, "refused": 0, "why": None, "seconds": 0.0}
        self._kinds: dict[tuple[int, int, int], _Kind] = {}
        # they keep the memory that recordings share from going with the first
        self._refused: list[_Recording] = []

    @property
    def report(self) -> dict[str, Any] | None:
        """`counts`, as they grow; None where passes go as they are."""
        return self.counts if self.fixed else None

    def warm(self, model: Llama, tokens: Tensor, cache: SlotCache, rows: int) -> None:
        """As many passes as it takes until ones like this are replayed, or refused; the cache
        stands where it stood.
        """
        if not self.fixed:
            return
        for _ in range(self.uses):
            self(model, tokens, cache, rows)
        cache.advance(1)
        self(model, tokens, cache, rows)
        cache.crop(cache.length - 1)

    def forget(self) -> None:
        """The text is over: no recording stays, and no cache for its sake."""
        self._kinds.clear()
        self._refused.clear()

    @torch.inference_mode()
    def __call__(self, model: Llama, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Logits (rows, V) after the last `rows` of tokens (T,), behind the content of `cache`."""
        if not (self.fixed and isinstance(cache, SlotCache) and len(tokens) <= MOST_ROWS):
            return model(tokens, cache, rows)
        key = (id(cache), len(tokens), rows)
        kind = self._kinds.get(key) or self._kinds.setdefault(key, _Kind(model, cache, rows))
        kind.uses += 1
        if kind.recording is not None and kind.trusted:
            return kind.recording.replay(tokens)
        started, logits = time.perf_counter(), None
        if kind.uses == self.uses:
            logits = self._record(kind, tokens)
        elif kind.recording is not None and cache.length != kind.recorded_at:
            logits = self._compare(kind, kind.recording, tokens)
        if logits is None:
            return model(tokens, cache, rows)
        self.counts["seconds"] += time.perf_counter() - started
        return logits

    def _record(self, kind: _Kind, tokens: Tensor) -> Tensor | None:
        # before anyone captures what others will not
        if not self._agreed(kind, self.recorder.broken):
            return None
        kind.recording, kind.recorded_at = (
            _Recording(kind.model, kind.cache, len(tokens), kind.rows),
            kind.cache.length,
        )
        # which a capture wants to have run before
        logits, why = kind.recording.launch(tokens), None
        try:
            kind.recording.made = self.recorder.record(kind.recording.run)
        except (RuntimeError, TierForceError) as error:  # whatever cannot be captured here
            why = repr(error.__cause__ or error)
        self._agreed(kind, why)
        return logits

    def _compare(self, kind: _Kind, recording: _Recording, tokens: Tensor) -> Tensor:
        """The replay, its own launches, and the pass as it is, of which the last counts."""
        recording.place(tokens)
        rows = recording.fixed.rows()
        rows.zero_()  # what a replay writes elsewhere shows
        replayed, kept = recording.made().clone(), rows.clone()
        launched, wanted = recording.launch(tokens), rows.clone()
        logits = kind.model(tokens, kind.cache, kind.rows)
        pairs = ((replayed, launched), (kept, wanted), (launched, logits))
        same, written, alike = (float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
        good = same <= _SAME and written <= _SAME and alike <= _ALIKE  # never of NaN
        off = (
            f"off by {same:.2g}, in what it keeps by {written:.2g}, and its launches by {alike:.2g}"
        )
        kind.trusted = self._agreed(kind, None if good else off)
        self.counts["replayed"] += kind.trusted
        return logits

    def _agreed(self, kind: _Kind, why: str | None) -> bool:
        """Whether all ranks of the model go on with it; `why`: this rank's reason against it."""
        reasons = [each for each in kind.model.group.gather(why) if each is not None]
        if reasons:
            if kind.recording is not None:
                self._refused.append(kind.recording)
            kind.recording = None
            self.counts["refused"] += 1
            self.counts["why"] = self.counts["why"] or reasons[0]
        return not reasons


class _Kind:
    """Passes of as many tokens and rows on one cache."""

    def __init__(self, model: Llama, cache: SlotCache, rows: int):
        self.model, self.cache, self.rows = model, cache, rows
        self.uses = 0
        self.recording: _Recording | None = None
        self.recorded_at = 0  # tokens in the cache then
        self.trusted = False


class _Recording:
    """A pass in fixed shapes, with its input where what was recorded looks for it."""

    def __init__(self, model: Llama, cache: SlotCache, tokens: int, rows: int):
        self.fixed = FixedPass(cache, tokens)
        self._tokens = torch.zeros(tokens, dtype=torch.int64, device=model.group.device)
        self.run: Callable[[], Tensor] = partial(model, self._tokens, self.fixed, rows)
        self.made: Callable[[], Tensor] = self.run

    def place(self, tokens: Tensor) -> None:
        self.fixed.place()
        self._tokens.copy_(tokens)

    def launch(self, tokens: Tensor) -> Tensor:
        self.place(tokens)
        return self.run().clone()

    def replay(self, tokens: Tensor) -> Tensor:
        self.place(tokens)
        return self.made().clone()  # the next one writes where this one did
