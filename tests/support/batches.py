"""Requests of random tokens, and their outputs in a batch and alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from decoding import Engine, Sampling
from decoding.app.results.part_answers import PartAnswers
from decoding.app.results.records import Records
from decoding.engine.request import Request, RequestState
from decoding.engine.stats import Stats
from support import engines
from support.models import random_tokens

SMALL: dict[str, Any] = {**engines.SMALL, "selection_interval": 1, "prompt_lookup_ngram": 0}
# several prefill chunks, and prompt lookup in modes without a draft
SERVING: dict[str, Any] = {**SMALL, "prompt_lookup_ngram": None, "prefill_chunk": 64}


def answer(summary: str) -> dict[str, Any]:
    """Return an answer as a batch gets it from an engine."""
    return {
        "summary": summary,
        **Stats(prompt_tokens=20, token_ids=[1, 2], finish_reason="stop").as_dict(),
        "dtype": "float32",
        "device": "cpu",
        "ranks": 1,
    }


def exit_after_answers(answers: int) -> None:
    """Let the job be killed at the moment when so many answers to tasks are on disk."""
    add, added = PartAnswers.add, list[str]()

    def add_or_exit(self: PartAnswers, digest: str, *arguments: Any) -> None:
        add(self, digest, *arguments)
        added.append(digest)
        if len(added) == answers:
            os._exit(9)

    PartAnswers.add = add_or_exit  # type: ignore[method-assign]


def requests(sampling: Sampling, sizes: Iterable[tuple[int, int]]) -> list[Request]:
    """Return a request for each pair of prompt tokens and new tokens."""
    return [
        Request(random_tokens(prompt, seed=prompt).tolist(), new, sampling) for prompt, new in sizes
    ]


def exit_after_records(count: int) -> None:
    """Let the job be killed at the moment when it has written so many records to disk."""
    append, appended = Records.append, list[str]()

    def append_or_exit(self: Records, record: dict[str, Any]) -> dict[str, Any]:
        written = append(self, record)
        appended.append(record["id"])
        if len(appended) == count:
            os._exit(9)
        return written

    Records.append = append_or_exit  # type: ignore[method-assign]


def run_batch(engine: Engine, batch: list[Request], concurrency: int) -> list[RequestState]:
    """Return the completions of concurrent requests, in the order of the requests."""
    completions = {id(each.request): each for each in engine.generate_batch(batch, concurrency)}
    assert len(completions) == len(batch)
    return [completions[id(request)] for request in batch]


def tokens(completions: list[RequestState]) -> list[list[int]]:
    """Return the tokens of each completion; raise the first error."""
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    return [completion.tokens for completion in completions]


def run_alone(engine: Engine, batch: list[Request]) -> list[list[int]]:
    """Return the tokens of each request when they run one after another."""
    return [
        list(engine.generate(each.prompt, each.max_new_tokens, each.sampling)) for each in batch
    ]


@contextmanager
def serving(
    models: engines.Pair,
    mode: str,
    concurrency: int,
    swap_space: int | None = 0,
    **options: Any,
) -> Iterator[Engine]:
    """Yield an engine in a conversation of several sequences; all are closed after it."""
    with models.engine(mode, **{**SERVING, **options}) as engine:
        if engine.group.rank:
            engine.run_worker()
            yield engine
            return
        with engine.conversation(100, concurrency, swap_space):
            yield engine
        assert not engine.sessions.executor.sequences
