"""Models with recurrent layers: drafts, turns, shared documents and the prompt cache."""

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
LAST = 768  # position before the end of a question at which its state is kept


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Pair:
    """A target that keeps its states every few tokens, and a draft with states too."""
    options = {"family": "qwen3_5_text", "max_position_embeddings": 4096}
    pair = Pair(checkpoint(**options), checkpoint(**options, seed=1))
    config = pair.target.config
    assert config.recurrent is not None
    pair.target.config = replace(config, recurrent=replace(config.recurrent, step=STEP))
    return pair


def alone(models: Pair, prompts: list[list[int]]) -> list[list[int]]:
    with models.engine("plain") as engine:
        return [list(engine.generate(prompt, NEW, GREEDY)) for prompt in prompts]


@pytest.mark.parametrize("mode", ["split", "split-retrieval", "split-hierarchical"])
def test_states_of_nested_levels_follow_those_above(
    mode: str, checkpoint: Callable[..., Path]
) -> None:
    """With all of the KV, and the target as its own draft, every draft token must be accepted."""
    folder = checkpoint(family="qwen3_5_text")
    lengths = {"num_draft_tokens": 9, "num_inner_draft_tokens": 3}
    options = {"retrieval_budget": 4096, "chunk_size": 4, "window": 256, "prompt_lookup_ngram": 0}
    with Pair(folder, folder, dtype="bfloat16").engine(
        mode, **options, **lengths, link="emulated:50", int8_retrieval=False
    ) as engine:
        list(engine.generate(random_tokens(70).tolist(), 40, GREEDY))
        rates = engine.stats.acceptance
    assert min(rate for rate in rates.values() if rate is not None) > 0.9, rates


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
    assert reused[4] == 600


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
    assert loaded == [LAST, 600, 600]


def test_a_damaged_state_in_the_prompt_cache_is_detected(models: Pair, cache_folder: str) -> None:
    options = {**SMALL, "link": "emulated:50", "prompt_cache": cache_folder}
    with models.engine("plain", **options) as engine:
        expected = list(engine.generate(QUESTIONS[0], NEW, GREEDY))
    (path,) = Path(cache_folder).glob(f"*/rank-0-layer-0-{LAST}.kv")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with models.engine("plain", **options) as engine:
        with pytest.warns(UserWarning, match="is corrupt .*does not match its checksum"):
            answer = list(engine.generate(QUESTIONS[0], NEW, GREEDY))
        assert engine.stats.loaded_tokens == 0
    assert answer == expected


def test_swapped_out_conversations(models: Pair) -> None:
    prompts = [QUESTIONS[0], random_tokens(650, seed=9).tolist()]
    with serving(models, "retrieval", 1, swap_space=None) as engine:
        states = [run_together(engine, [Request(each, NEW, GREEDY)])[0] for each in prompts]
        turn = [*prompts[0], *states[0].tokens, 5]
        branch = [*prompts[0][:640], *random_tokens(60, seed=3).tolist()]
        for prompt, reused in ((turn, LAST), (branch, 600)):
            (state,) = run_together(engine, [Request(prompt, NEW, GREEDY)])
            assert state.stats.reused_tokens == reused
            assert [state.tokens] == alone(models, [prompt])


def test_batches(models: Pair) -> None:
    sizes = [(90, 20), (400, 12), (33, 30)]
    requests = batches.requests(GREEDY, sizes)
    with models.engine("hierarchical", **batches.SMALL) as engine:
        together = batches.tokens(batches.run_batch(engine, requests, 3))
    with models.engine("plain") as engine:
        assert together == batches.run_alone(engine, requests)
