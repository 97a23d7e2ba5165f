"""Engines on models that are loaded once: the demo pair, or tiny random checkpoints without a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoding import GREEDY, Engine, Sampling, Settings
from decoding.models.runtime import Runtime
from decoding.prefix_cache.manager import ModelFingerprint
from parallel.model.loading import load_model, load_predictor
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup

T = TypeVar("T")
DEMO = Path(__file__).parents[2] / "demo"
# settings that use every level after a prompt of a few hundred tokens, with offloaded layers
EVERY_LEVEL: dict[str, Any] = {
    "dtype": "float32",
    "retrieval_budget": 300,
    "num_draft_tokens": 6,
    "num_inner_draft_tokens": 2,
    "link": "emulated:50",
    "gpu_kv_layers": 1,
}
MODES = ["plain", "retrieval", "speculative", "hierarchical"]
# Even short sequences outgrow such small caches; draft lengths are fixed, since adaptive ones
# depend on timings.
SMALL: dict[str, Any] = {
    "retrieval_budget": 32,
    "chunk_size": 4,
    "window": 12,
    "sinks": 2,
    "num_draft_tokens": 5,
    "num_inner_draft_tokens": 2,
}
# host links, and numbers of on-device layers
PLACEMENTS = [("view", 1), ("emulated:50", 0), ("emulated:50", 1), ("emulated:50", 2)]
# one for all models: each test has a prompt cache of its own
IDENTITY = ModelFingerprint("0123", "a pair")

Folders = tuple[Path, Path]  # a target's and its draft's


class Pair:
    """A target and a draft on this rank, whose weights engines of any mode and settings share."""

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        group: TensorParallelGroup | None = None,
        dtype: str = "float32",
    ):
        """Without a draft's folder, load the target's prediction block."""
        # conftest does so for each test, but after the fixtures of a module
        torch.set_num_threads(1)
        self.group = group or TensorParallelGroup()
        self.dtype = dtype
        self.target = load_model(target, self.group, dtype)
        alone = TensorParallelGroup(device=self.group.device)
        self.draft: Transformer | None = None
        if draft is None:
            self.draft = load_predictor(target, self.target)
        elif self.group.rank == 0:
            self.draft = load_model(draft, alone, dtype)

    @contextmanager
    def engine(self, mode: str, stop: Sequence[int] = (), **options: Any) -> Iterator[Engine]:
        """Yield an engine for lists of token ids.

        `options` are those of Settings; without `stop`, no token ends a sequence.
        """
        settings = Settings(mode=mode, dtype=self.dtype, **options)
        resolved = settings.resolved_mode(has_draft=True)
        runtime = Runtime.create(self.target, self.draft, resolved, settings, IDENTITY)
        try:
            yield Engine(runtime, None, frozenset(stop))
        finally:
            runtime.link.close()

    def generate(
        self,
        mode: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        **options: Any,
    ) -> list[int]:
        """Return what a new engine generates after the prompt; [] on ranks other than 0."""
        with self.engine(mode, **options) as engine:
            return list(engine.generate(prompt, max_new_tokens, sampling))


def lead(engine: Engine, function: Callable[[Engine], T]) -> list[T]:
    """Call a function with an engine on rank 0, and run workers on the other ranks.

    Closes the engine. Returns the result in a list on rank 0, and [] on the others.
    """
    if engine.group.rank:
        engine.run_worker()
        return []
    result = function(engine)
    engine.close()
    return [result]
