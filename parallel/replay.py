"""Short passes recorded once and replayed: on a GPU a CUDA graph, one launch where a pass of a 7B model is hundreds.

Recording follows gpt-fast and torch's notes on CUDA graphs: fixed addresses in and out, a warm-up before. What a recording
gives is compared once with the pass it stands for; where they differ, or recording fails, passes go on as they were.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload import Cache, FixedPass, SlotCache, TierForceError
from parallel.group import Group
from parallel.llama import Llama

MOST_ROWS = 18  # of a pass worth recording: a longest draft at the retrieval level, and what was pending
_USES = 3  # passes of one kind before it is recorded: rare kinds do not pay for it
_DIFFERENCE = 0.05  # of the largest logit: a recording that is off by more is wrong, not rounded otherwise


class Replay:
    """Calls models on the caches of one text: short passes on a `SlotCache` in fixed shapes where `fixed`, all else as it is."""

    def __init__(self, group: Group, fixed: bool):
        self.group, self.fixed = group, fixed
        self._passes: dict[tuple[int, int, int], _Pass] = {}  # by cache, tokens and rows

    def __call__(self, model: Llama, tokens: Tensor, cache: Cache, rows: int) -> Tensor:
        """Logits (rows, V) after the last `rows` of tokens (T,), behind the content of `cache`."""
        if not (self.fixed and isinstance(cache, SlotCache) and len(tokens) <= MOST_ROWS):
            return model(tokens, cache, rows)
        key = (id(cache), len(tokens), rows)
        if key not in self._passes:
            self._passes[key] = _Pass(self.group, model, cache, len(tokens), rows)
        return self._passes[key](tokens)

    @property
    def counts(self) -> dict[str, int]:
        """Kinds of passes (cache, tokens, rows) in fixed shapes: how many were recorded, and how many could not be."""
        states = [known.recorded for known in self._passes.values()]
        return {"recorded": states.count(True), "refused": states.count(False)}


class _Pass:
    def __init__(self, group: Group, model: Llama, cache: SlotCache, tokens: int, rows: int):
        self.group, self.model, self.rows = group, model, rows
        self.fixed = FixedPass(cache, tokens)
        self.tokens = torch.zeros(tokens, dtype=torch.int64, device=group.device)
        self.uses = 0
        self.recorded: bool | None = None  # None: not tried yet
        self.again: Callable[[], Tensor] = self._run

    def __call__(self, tokens: Tensor) -> Tensor:
        self.fixed.place()
        self.tokens.copy_(tokens)
        self.uses += 1
        logits = self.again().clone()  # the next replay writes where this one did
        if self.uses == _USES:
            self._record(logits)
        return logits

    def _run(self) -> Tensor:
        return self.model(self.tokens, self.fixed, self.rows)

    def _record(self, wanted: Tensor) -> None:
        try:
            again = self.group.record(self._run)
            self.recorded = bool((again() - wanted).abs().max() <= _DIFFERENCE * wanted.abs().max())
        except (RuntimeError, TierForceError):  # whatever cannot be captured here
            self.recorded = False
        if self.recorded:
            self.again = again
