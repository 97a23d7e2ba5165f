"""Short passes recorded once and replayed: on a GPU a CUDA graph, one launch where a pass of a 7B model is hundreds.

Recording follows gpt-fast and torch's notes on CUDA graphs: fixed addresses in and out, a warm-up before. A recording is compared
before it is trusted, somewhere else in the text than where it was made. What cannot be captured, or differs, goes on as it was:
on all ranks, since a collective is replayed by all or by none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload import Cache, FixedPass, SlotCache, TierForceError
from parallel.group import Recorder
from parallel.llama import Llama

MOST_ROWS = 18  # of a pass worth recording: a longest draft at the retrieval level, and what was pending
USES = 16  # passes of one kind before it is recorded: rare kinds do not pay for it
_SAME = 0.01  # of the largest logit: by how much a replay may differ from its own launches
_ALIKE = 0.05  # and these from the pass as it is, which other kernels compute


class Replay:
    """Calls models on the caches of one text: short passes on a `SlotCache` in fixed shapes where `fixed`, all else as it is.

    Kinds of passes (cache, tokens, rows) become replays when they come often. `counts` says how many did, how many could not,
    why, and what it took.
    """

    def __init__(self, fixed: bool, recorder: Recorder, uses: int | None = None):
        self.fixed, self.recorder, self.uses = fixed, recorder, USES if uses is None else uses
        self.counts: dict[str, Any] = {"in fixed shapes": 0, "refused": 0, "why": None, "seconds": 0.0}
        self._passes: dict[tuple[int, int, int], _Pass] = {}

    @property
    def report(self) -> dict[str, Any] | None:
        """`counts`, as they grow; None where passes go as they are."""
        return self.counts if self.fixed else None

    @torch.inference_mode()
    def __call__(self, model: Llama, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Logits (rows, V) after the last `rows` of tokens (T,), behind the content of `cache`."""
        if not (self.fixed and isinstance(cache, SlotCache) and len(tokens) <= MOST_ROWS):
            return model(tokens, cache, rows)
        key = (id(cache), len(tokens), rows)
        if key not in self._passes:
            self._passes[key] = _Pass(model, cache, rows)
        known = self._passes[key]
        known.uses += 1
        if known.trusted and known.replay is not None:
            known.replay.place(tokens)
            return known.replay.again().clone()  # the next replay writes where this one did
        if known.uses in (self.uses, self.uses + 1) and not known.refused:
            started = time.perf_counter()
            logits = (self._record if known.uses == self.uses else self._compare)(known, tokens)
            self.counts["seconds"] += time.perf_counter() - started
            return logits
        return model(tokens, cache, rows)

    def _record(self, known: _Pass, tokens: Tensor) -> Tensor:
        known.replay = _Replayed(known.model, known.cache, len(tokens), known.rows)
        known.replay.place(tokens)
        logits = known.replay.run().clone()  # also what a capture wants to have run before
        why = self.recorder.broken
        if why is None:
            try:
                known.replay.again = self.recorder.record(known.replay.run)
            except (RuntimeError, TierForceError) as error:  # whatever cannot be captured here
                why = repr(error.__cause__ or error)
        self._agreed(known, why)
        return logits

    def _compare(self, known: _Pass, tokens: Tensor) -> Tensor:
        """The replay, its own launches, and the pass as it is, of which the last counts."""
        assert known.replay is not None
        known.replay.place(tokens)
        replayed = known.replay.again().clone()
        launched = known.replay.run().clone()
        logits = known.model(tokens, known.cache, known.rows)
        same, alike = (float((x - y).abs().max() / y.abs().max()) for x, y in ((replayed, launched), (launched, logits)))
        good = same <= _SAME and alike <= _ALIKE  # never of NaN
        known.trusted = self._agreed(known, None if good else f"off by {same:.2g} and {alike:.2g} of the largest logit")
        self.counts["in fixed shapes"] += known.trusted
        return logits

    def _agreed(self, known: _Pass, why: str | None) -> bool:
        """Whether all ranks of the model go on with it."""
        reasons = [each for each in known.model.group.gather(why) if each is not None]
        if reasons:
            known.refused, known.replay = True, None
            self.counts["refused"] += 1
            self.counts["why"] = self.counts["why"] or reasons[0]
        return not reasons


class _Pass:
    """One kind of pass."""

    def __init__(self, model: Llama, cache: SlotCache, rows: int):
        self.model, self.cache, self.rows = model, cache, rows
        self.uses = 0
        self.replay: _Replayed | None = None
        self.trusted = self.refused = False


class _Replayed:
    """A pass in fixed shapes, with its input where a recording looks for it."""

    def __init__(self, model: Llama, cache: SlotCache, tokens: int, rows: int):
        self._fixed = FixedPass(cache, tokens)
        self._tokens = torch.zeros(tokens, dtype=torch.int64, device=model.group.device)
        self.run: Callable[[], Tensor] = partial(model, self._tokens, self._fixed, rows)
        self.again: Callable[[], Tensor] = self.run

    def place(self, tokens: Tensor) -> None:
        self._fixed.place()
        self._tokens.copy_(tokens)
