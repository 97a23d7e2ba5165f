"""Requests of random tokens, and what comes of them together and alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decoding import Engine, Sampling
from decoding.engine.request import Request
from decoding.engine.scheduler import Written
from support import engines
from support.models import random_tokens

SMALL: dict[str, Any] = {**engines.SMALL, "refresh": 1, "lookup": 0}


def requests(sampling: Sampling, sizes: Iterable[tuple[int, int]]) -> list[Request]:
    return [
        Request(random_tokens(prompt, seed=prompt).tolist(), new, sampling) for prompt, new in sizes
    ]


def written(engine: Engine, asked: list[Request], at_once: int) -> list[Written]:
    """What comes of each request, in their order."""
    found = {id(text.request): text for text in engine.write(asked, at_once)}
    assert len(found) == len(asked)
    return [found[id(request)] for request in asked]


def tokens(texts: list[Written]) -> list[list[int]]:
    for text in texts:
        if text.error is not None:
            raise text.error
    return [text.tokens for text in texts]


def alone(engine: Engine, asked: list[Request]) -> list[list[int]]:
    return [list(engine.generate(each.prompt, each.new, each.sampling)) for each in asked]
