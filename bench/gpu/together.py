"""The part of a GPU day in which several requests share an engine, as on a server.

Four questions to one document, one after another and together; a short request that arrives while
a long prompt is being read; and questions to two documents in turn, with room for one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

from bench.gpu.choices import Context
from bench.gpu.models import fit_context, load_models, mode_of, prompt_of
from bench.harness.decode_loop import run_together
from decoding import GREEDY, Engine, Settings
from decoding.config.settings import LEVELS
from decoding.engine.request import Request, Status
from decoding.models.runtime import Runtime

_DOCUMENT, _QUESTION, _LONG = 16_384, 40, 65_536  # prompt tokens
_NEW = 64  # tokens of an answer
_CLIENTS = 4


def together(context: Context) -> None:
    """All KV on the device: what sharing forwards and prefixes gains, and how long others wait."""
    target, _, tokenizer = load_models(context.choices, context.group)
    document, long = context.tokens(_DOCUMENT), context.tokens(_LONG)
    long = fit_context(target.config, target.embed.weight.dtype, long)
    prompt = prompt_of(target.config, tokenizer, long + _CLIENTS * _QUESTION)
    questions = [prompt[long:][index::_CLIENTS] for index in range(_CLIENTS)]
    batch = [Request([*prompt[:document], *each], _NEW, GREEDY) for each in questions]
    for mode in ("plain", mode_of(context, context.choices.mode)):
        alone: list[list[int]] = []
        for concurrency in (1, _CLIENTS):
            with _engine(context, mode, concurrency) as engine:
                list(engine.submit(Request(prompt[-300:], 8, GREEDY)))  # warms up
                started = time.perf_counter()
                states = run_together(engine, batch)
                what = f"{mode}, {_CLIENTS} questions to {document:,} tokens, {concurrency} at once"
                context.add(f"{what}: all answers", time.perf_counter() - started, "s")
                rate = mean(state.stats.ms_per_token or 0.0 for state in states)
                context.add(f"{mode}, {concurrency} at once: ms/token", rate, "ms")
                if concurrency == 1:
                    alone = [list(state.tokens) for state in states]
                    continue
                same = sum(state.tokens == one for state, one in zip(states, alone, strict=True))
                context.add(
                    f"{mode}: answers with the same tokens as alone", f"{same} of {_CLIENTS}"
                )
                _short_beside_long(context, engine, mode, prompt[:long])
    documents = [prompt[:document], prompt[:document][::-1]]
    for swap_space in (0, None):
        with _engine(context, "plain", 1, swap_space) as engine:
            _in_turn(context, engine, documents, questions, swap_space != 0)


def _in_turn(
    context: Context,
    engine: Engine,
    documents: list[list[int]],
    questions: list[list[int]],
    is_swapped: bool,
) -> None:
    """Report how long a second question to a document waits after one to another document."""
    for first, second in zip(documents, questions, strict=False):
        run_together(engine, [Request([*first, *second], 8, GREEDY)])
    waits = []
    for first, second in zip(documents, questions[2:], strict=False):
        (state,) = run_together(engine, [Request([*first, *second], 8, GREEDY)])
        waits.append(state.stats.first_token_s)
    how = "swapped out meanwhile" if is_swapped else "no swap space"
    what = f"plain, {len(documents[0]):,} tokens, {how}: first token of another question"
    context.add(what, 1e3 * mean(waits), "ms")


def _short_beside_long(context: Context, engine: Engine, mode: str, long: list[int]) -> None:
    """Report how long a short request waits while a long prompt is being read."""
    scheduler = engine.scheduler
    slow = scheduler.add(Request(long[::-1], 8, GREEDY))  # no prefix of it is cached
    scheduler.step()
    while slow.missing > 0.8 * len(long):
        scheduler.step()
    started, longest_s = time.perf_counter(), 0.0
    quick = scheduler.add(Request(long[:100], 8, GREEDY))
    while not quick.tokens:
        before = time.perf_counter()
        scheduler.step()
        longest_s = max(longest_s, time.perf_counter() - before)
    is_beside = slow.status is Status.PREFILLING
    what = f"{mode}: first token of a short request while {len(long):,} tokens are read"
    context.add(what, 1e3 * (time.perf_counter() - started) if is_beside else None, "ms")
    context.add(f"{mode}: longest step meanwhile", 1e3 * longest_s, "ms")
    while scheduler.is_busy:
        scheduler.step()
    context.add(f"{mode}: first token of the long one", slow.stats.first_token_s, "s")


@contextmanager
def _engine(
    context: Context, mode: str, concurrency: int, swap_space: int | None = 0
) -> Iterator[Engine]:
    """Yield an engine that keeps the caches of so many sequences, and free all its memory."""
    choices = context.choices
    target, draft, _ = load_models(choices, context.group)
    settings = Settings(
        mode=mode,
        link=choices.link,
        rope=choices.rope,
        graphs=context.graphs,
        retrieval_budget=min(choices.retrieval_budget, context.tokens(_DOCUMENT) // 4),
        int8_retrieval=choices.int8,
    )
    runtime = Runtime.create(target, draft if "draft" in LEVELS[mode] else None, mode, settings)
    engine = Engine(runtime, None, frozenset())
    try:
        with engine.conversation(concurrency=concurrency, swap_space=swap_space):
            yield engine
    finally:
        engine.close()
        runtime.arena.free()
