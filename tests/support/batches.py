"""Requests of random tokens, and what comes of them together and alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decoding import Engine, Sampling
from decoding.engine.request import Request
from decoding.engine.scheduler import Completion
from support import engines
from support.models import random_tokens

SMALL: dict[str, Any] = {**engines.SMALL, "selection_interval": 1, "prompt_lookup_ngram": 0}


def requests(sampling: Sampling, sizes: Iterable[tuple[int, int]]) -> list[Request]:
    return [
        Request(random_tokens(prompt, seed=prompt).tolist(), new, sampling) for prompt, new in sizes
    ]


def written(engine: Engine, asked: list[Request], concurrency: int) -> list[Completion]:
    """What comes of each request, in their order."""
    found = {id(text.request): text for text in engine.generate_batch(asked, concurrency)}
    assert len(found) == len(asked)
    return [found[id(request)] for request in asked]


def tokens(texts: list[Completion]) -> list[list[int]]:
    for text in texts:
        if text.error is not None:
            raise text.error
    return [text.tokens for text in texts]


def alone(engine: Engine, asked: list[Request]) -> list[list[int]]:
    return [
        list(engine.generate(each.prompt, each.max_new_tokens, each.sampling)) for each in asked
    ]
