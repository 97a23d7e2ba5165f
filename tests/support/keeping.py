"""Prompts that are kept on disk: what is asked behind them, and what is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decoding import GREEDY, Engine, Sampling
from decoding.prefix_cache.store import CachedPrompt, PromptCache
from support import batches
from support.engines import MODES, PLACES
from support.models import random_tokens
from support.slow import slow_except

NEW = 8
SMALL: dict[str, Any] = {**batches.SMALL, "prefill_chunk": 200}
PROMPT = random_tokens(700, seed=1).tolist()
QUESTIONS = [random_tokens(count, seed=count).tolist() for count in (5, 20, 35)]
SAMPLED = Sampling(1.0, top_p=1, seed=5)
# each mode in each place; each is once in one that is not slow
WAYS = slow_except(
    [(mode, *place) for place in PLACES for mode in MODES],
    *(place * len(MODES) + mode for place, mode in enumerate((0, 1, 3, 2))),
)


@contextmanager
def told(engine: Engine) -> Iterator[list[str]]:
    """What an engine warns of."""
    lines: list[str] = []
    assert engine.sessions.prefix_cache is not None
    engine.sessions.prefix_cache.warn = lines.append
    yield lines


def answers(engine: Engine, sampling: Sampling = GREEDY) -> list[list[int]]:
    prompts = [[*PROMPT, *question] for question in QUESTIONS]
    return [list(engine.generate(prompt, NEW, sampling)) for prompt in prompts]


def prompts_in(folder: str) -> list[CachedPrompt]:
    cache = PromptCache(Path(folder))
    cache.create()
    cache.collect_garbage()
    return cache.prompts()
