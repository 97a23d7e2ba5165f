"""Prompts in a prompt cache, and requests that extend them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decoding import GREEDY, Engine, Sampling
from decoding.prefix_cache.store import CachedPrompt, PromptCache
from support import batches
from support.engines import MODES, PLACEMENTS
from support.models import random_tokens
from support.slow import slow_except

NEW = 8
SMALL: dict[str, Any] = {**batches.SMALL, "prefill_chunk": 200}
PROMPT = random_tokens(700, seed=1).tolist()
QUESTIONS = [random_tokens(count, seed=count).tolist() for count in (5, 20, 35)]
SAMPLED = Sampling(1.0, top_p=1, seed=5)
# each mode in each placement; all modes and all placements occur in the cases that are not slow
CASES = slow_except(
    [(mode, *placement) for placement in PLACEMENTS for mode in MODES],
    *(index * len(MODES) + mode for index, mode in enumerate((0, 1, 3, 2))),
)


@contextmanager
def collect_warnings(engine: Engine) -> Iterator[list[str]]:
    """Yield the list that an engine's prompt cache warnings are added to."""
    lines: list[str] = []
    assert engine.sessions.prefix_cache is not None
    engine.sessions.prefix_cache.warn = lines.append
    yield lines


def answers(engine: Engine, sampling: Sampling = GREEDY) -> list[list[int]]:
    """Return what is generated after PROMPT and each of QUESTIONS."""
    prompts = [[*PROMPT, *question] for question in QUESTIONS]
    return [list(engine.generate(prompt, NEW, sampling)) for prompt in prompts]


def prompts_in(folder: str) -> list[CachedPrompt]:
    """Return the prompts in a prompt cache, after garbage collection."""
    cache = PromptCache(Path(folder))
    cache.create()
    cache.collect_garbage()
    return cache.prompts()
