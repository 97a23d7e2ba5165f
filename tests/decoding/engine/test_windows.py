"""Requests to models with sliding windows go on where these are kept, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decoding import GREEDY
from support.batches import SERVING as SMALL
from support.engines import Pair
from support.models import random_tokens
from support.shared_documents import (
    DOCUMENT,
    NEW,
    QUESTIONS,
    STEP,
    check_announced,
    check_batches,
    check_chat,
    check_prompt_cache,
    check_questions,
    check_stored,
    check_swapped_out,
    check_turns,
    keep_every,
)
from support.slow import slow_except

MODES = ["plain", "retrieval", "hierarchical"]
FAMILIES = {"gemma3_text": {"family": "gemma3_text"}, "mistral": {"family": "mistral"}}


@pytest.fixture(scope="module", params=slow_except(FAMILIES))
def models(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Pair:
    """A target some of whose layers have a window, or all, and keep it every few tokens."""
    options = {**FAMILIES[request.param], "sliding_window": 24, "max_position_embeddings": 4096}
    pair = Pair(checkpoint(**options), checkpoint(**options, seed=1))
    keep_every(pair, STEP)
    return pair


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_questions_to_one_document(models: Pair, mode: str) -> None:
    check_questions(models, mode)


@pytest.mark.parametrize("concurrency", slow_except([1, 3], 1))
@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_announced_questions_go_on_at_the_end_of_the_document(
    models: Pair, mode: str, concurrency: int
) -> None:
    reused = check_announced(models, mode, concurrency)
    assert reused == [0, 700, 700, 700, 0, 350]


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_questions_about_a_stored_document_load_it_once(
    models: Pair, mode: str, cache_folder: str
) -> None:
    assert check_stored(models, mode, cache_folder) == [(0, 700), (700, 0), (700, 0)]


def test_chat_that_starts_over_goes_on_at_the_end_of_its_document(
    checkpoint: Callable[..., Path],
) -> None:
    options = {**FAMILIES["gemma3_text"], "sliding_window": 24, "max_position_embeddings": 4096}
    target = checkpoint(**options, vocab_size=2048)  # the tokenizer's
    first, *others = check_chat(Pair(target, target))
    assert first > 500
    assert max(others) < 120


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_turns_that_extend_or_replace_a_conversation(models: Pair, mode: str) -> None:
    reused = check_turns(models, mode)
    assert 600 <= reused[4] <= 650


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_the_prompt_cache(models: Pair, mode: str, cache_folder: str) -> None:
    loaded = check_prompt_cache(models, mode, cache_folder)
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
    tokens, reused = check_swapped_out(models)
    for count, expected in zip(reused, (tokens - 33, 600), strict=True):
        assert expected - 64 <= count <= expected + 32


def test_batches(models: Pair) -> None:
    check_batches(models)
