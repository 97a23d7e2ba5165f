"""Engines on models that are loaded once: the demo pair, or tiny random checkpoints that have no
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
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup

T = TypeVar("T")
DEMO = Path(__file__).parents[2] / "demo"
# settings that put every level to work behind a prompt of a few hundred tokens, over a link
EVERY_LEVEL: dict[str, Any] = {
    "dtype": "float32",
    "retrieval_budget": 300,
    "num_draft_tokens": 6,
    "num_inner_draft_tokens": 2,
    "link": "emulated:50",
    "gpu_kv_layers": 1,
}
MODES = ["plain", "retrieval", "speculative", "hierarchical"]
# so small that even short texts outgrow every cache; with lengths of their own, since those that
# adapt go by the clock
SMALL: dict[str, Any] = {
    "retrieval_budget": 32,
    "chunk_size": 4,
    "window": 12,
    "sinks": 2,
    "num_draft_tokens": 5,
    "num_inner_draft_tokens": 2,
}
# links, and how many layers are on the device
PLACES = [("view", 1), ("emulated:50", 0), ("emulated:50", 1), ("emulated:50", 2)]
IDENTITY = ModelFingerprint(
    "0123", "a pair"
)  # where prompts are kept: each test in a folder of its own

Folders = tuple[Path, Path]  # of a target and its draft


class Pair:
    """A target and a draft on this rank; engines in any mode and with any settings share their
    weights.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        group: TensorParallelGroup | None = None,
        dtype: str = "float32",
    ):
        # as conftest does for a test; a fixture of a whole module comes before it
        torch.set_num_threads(1)
        self.group = group or TensorParallelGroup()
        self.dtype = dtype
        self.target = load_model(target, self.group, dtype)
        alone = TensorParallelGroup(device=self.group.device)
        self.draft = load_model(draft, alone, dtype) if self.group.rank == 0 else None

    @contextmanager
    def engine(self, mode: str, stop: Sequence[int] = (), **choices: Any) -> Iterator[Engine]:
        """An engine for lists of token ids. `choices` are those of Settings; without `stop`, no
        token ends a text.
        """
        settings = Settings(mode=mode, dtype=self.dtype, **choices)
        resolved = settings.resolved_mode(has_draft=True)
        runtime = Runtime.create(self.target, self.draft, resolved, settings, IDENTITY)
        try:
            yield Engine(runtime, None, frozenset(stop))
        finally:
            runtime.link.close()

    def text(
        self,
        mode: str,
        prompt: Sequence[int],
        new: int,
        sampling: Sampling = GREEDY,
        **choices: Any,
    ) -> list[int]:
        """What an engine of its own writes behind the prompt; [] on ranks other than 0."""
        with self.engine(mode, **choices) as engine:
            return list(engine.generate(prompt, new, sampling))


def lead(engine: Engine, what: Callable[[Engine], T]) -> list[T]:
    """Let rank 0 do something with an engine and close it, while the other ranks follow; what came
    of it is in the list of rank 0.
    """
    if engine.group.rank:
        engine.run_worker()
        return []
    found = what(engine)
    engine.close()
    return [found]
