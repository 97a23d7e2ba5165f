"""Requests to models with sliding windows go on where these are kept, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.decode_loop import run_together
from decoding import GREEDY
from decoding.engine.request import Request
from support import batches
from support.batches import SERVING as SMALL
from support.batches import serving
from support.engines import Pair
from support.models import random_tokens
from support.slow import slow_except

NEW, STEP = 12, 300
MODES = ["plain", "retrieval", "hierarchical"]
DOCUMENT = random_tokens(700, seed=1).tolist()
QUESTIONS = [[*DOCUMENT, *random_tokens(100 + count, seed=count).tolist()] for count in range(2, 5)]
FAMILIES = {"gemma3_text": {"family": "gemma3_text"}, "mistral": {"family": "mistral"}}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Pair:
    """A target some of whose layers have a window, or all, and keep it every few tokens."""
    options = {**FAMILIES[request.param], "sliding_window": 24, "max_position_embeddings": 4096}
    pair = Pair(checkpoint(**options), checkpoint(**options, seed=1))
    config = pair.target.config
    assert config.sliding_window is not None
    window = replace(config.sliding_window, step=STEP)
    pair.target.config = replace(config, sliding_window=window)
    return pair


def alone(models: Pair, prompts: list[list[int]]) -> list[list[int]]:
    with models.engine("plain") as engine:
        return [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_questions_to_one_document(models: Pair, mode: str) -> None:
    requests = [Request(prompt, NEW, GREEDY) for prompt in QUESTIONS]
    with serving(models, mode, 4, link="emulated:50") as engine:
        states = run_together(engine, requests)
        # up to the last multiple of the step within the document
        assert [state.stats.reused_tokens for state in states] == [0, 600, 600]
        again = run_together(engine, requests[:1])
    assert [state.tokens for state in states] == alone(models, QUESTIONS)
    assert again[0].tokens == states[0].tokens


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_turns_that_extend_or_replace_a_conversation(models: Pair, mode: str) -> None:
    prompts, reused = [QUESTIONS[0]], []
    with models.engine(mode, **SMALL, link="emulated:50") as engine, engine.conversation(room=2000):
        for common, count in [(None, 30), (None, 250), (900, 40), (650, 400), (None, 5), (0, 50)]:
            answer = list(engine.generate(prompts[-1], NEW, GREEDY))
            reused.append(engine.stats.reused_tokens)
            turn = random_tokens(count, seed=count).tolist()
            known = [*prompts[-1], *answer]
            prompts.append([*known[: len(known) if common is None else common], *turn])
            if engine.scheduler.caches.kept:
                engine.scheduler.caches.kept[0].token_s = 1e9  # reuse pays
        last = list(engine.generate(prompts[-1], NEW, GREEDY))
    answers = alone(models, prompts)
    assert last == answers[-1]
    for prompt, answer, following in zip(prompts, answers, prompts[1:], strict=False):
        if following[: len(prompt)] == prompt and len(following) > len(prompt) + NEW:
            assert following[len(prompt) :][:NEW] == answer
    assert reused[0] == 0
    assert reused[1] >= len(QUESTIONS[0])  # goes on at the end
    assert reused[3] == 900  # a multiple of the step
    assert 600 <= reused[4] <= 650


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_the_prompt_cache(models: Pair, mode: str, cache_folder: str) -> None:
    options = {**SMALL, "link": "emulated:50", "prompt_cache": cache_folder}
    expected = alone(models, QUESTIONS)
    with models.engine(mode, **options) as engine:
        assert list(engine.generate(QUESTIONS[0], NEW, GREEDY)) == expected[0]
    loaded = []
    for prompt, answer in zip(QUESTIONS, expected, strict=True):
        with models.engine(mode, **options) as engine:
            assert list(engine.generate(prompt, NEW, GREEDY)) == answer
            loaded.append(engine.stats.loaded_tokens)
    assert loaded == [len(QUESTIONS[0]) - 32, 600, 600]


@pytest.mark.parametrize("tokens", [200, 300, 450, 650])
def test_windows_longer_than_the_step_in_the_prompt_cache(
    models: Pair, cache_folder: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = models.target.config
    assert config.sliding_window is not None
    window = replace(config.sliding_window, tokens=350, step=STEP)
    monkeypatch.setattr(models.target, "config", replace(config, sliding_window=window))
    prompt = DOCUMENT[:tokens]
    prompts = [prompt, [*prompt, *random_tokens(50, seed=2).tolist()], DOCUMENT]
    with models.engine("plain") as engine:
        expected = [list(engine.generate(each, NEW, GREEDY)) for each in prompts]
    for each, answer in zip(prompts, expected, strict=True):
        options = {**SMALL, "link": "emulated:50", "prompt_cache": cache_folder}
        with models.engine("retrieval", **options) as engine:
            assert list(engine.generate(each, NEW, GREEDY)) == answer
            loaded = engine.stats.loaded_tokens
            assert loaded == (0 if each is prompts[0] or tokens < 256 else tokens)


def test_swapped_out_conversations(models: Pair) -> None:
    prompts = [QUESTIONS[0], random_tokens(650, seed=9).tolist()]
    with serving(models, "retrieval", 1, swap_space=None) as engine:
        states = [run_together(engine, [Request(each, NEW, GREEDY)])[0] for each in prompts]
        turn = [*prompts[0], *states[0].tokens, 5]
        branch = [*prompts[0][:640], *random_tokens(60, seed=3).tolist()]
        for prompt, reused in ((turn, len(turn) - 33), (branch, 600)):
            (state,) = run_together(engine, [Request(prompt, NEW, GREEDY)])
            assert reused - 64 <= state.stats.reused_tokens <= reused + 32
            assert [state.tokens] == alone(models, [prompt])


def test_batches(models: Pair) -> None:
    sizes = [(90, 20), (400, 12), (33, 30)]
    requests = batches.requests(GREEDY, sizes)
    with models.engine("hierarchical", **batches.SMALL) as engine:
        together = batches.tokens(batches.run_batch(engine, requests, 3))
    with models.engine("plain") as engine:
        assert together == batches.run_alone(engine, requests)
