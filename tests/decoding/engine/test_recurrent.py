"""Models with recurrent layers: drafts, turns, shared documents and the prompt cache."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import offload.tiered.kv_file
from decoding import GREEDY
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from support.batches import SERVING as SMALL
from support.caches import resident
from support.engines import Pair
from support.families import OTHERS
from support.models import random_tokens
from support.shared_documents import (
    DOCUMENT,
    NEW,
    QUESTIONS,
    STEP,
    alone,
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

KINDS = ["qwen3_5", "granite-mamba"]
MODES = ["plain", "retrieval", "hierarchical"]
LAST = 768  # position before the end of a question at which its state is kept


@pytest.fixture(scope="module", params=slow_except(KINDS, 0))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of `build_checkpoint` for a model with gated delta nets, or with Mamba-2."""
    options: dict[str, Any] = OTHERS[request.param]
    return options


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], kind: dict[str, Any]) -> Pair:
    """A target that keeps its states every few tokens, and a draft with states too."""
    options = {**kind, "max_position_embeddings": 4096}
    pair = Pair(checkpoint(**options), checkpoint(**options, seed=1))
    keep_every(pair, STEP)
    return pair


@pytest.mark.parametrize("mode", ["split", "split-retrieval", "split-hierarchical"])
def test_states_of_nested_levels_follow_those_above(
    mode: str, checkpoint: Callable[..., Path], kind: dict[str, Any]
) -> None:
    """With all of the KV, and the target as its own draft, every draft token must be accepted."""
    folder = checkpoint(**kind)
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
    check_questions(models, mode)


@pytest.mark.parametrize("concurrency", slow_except([1, 3], 1))
@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_announced_questions_go_on_near_the_end_of_the_document(
    models: Pair, mode: str, concurrency: int
) -> None:
    reused = check_announced(models, mode, concurrency)
    assert reused == [0, 640, 640, 640, 0, 320]


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_questions_about_a_stored_document_load_it_once(
    models: Pair, mode: str, cache_folder: str
) -> None:
    assert check_stored(models, mode, cache_folder) == [(0, 640), (640, 0), (640, 0)]


def test_chat_that_starts_over_goes_on_at_the_end_of_its_document(
    checkpoint: Callable[..., Path], kind: dict[str, Any]
) -> None:
    options = {**kind, "max_position_embeddings": 4096}
    target = checkpoint(**options, vocab_size=2048)  # the tokenizer's
    first, *others = check_chat(Pair(target, target))
    assert first > 500
    assert max(others) < 120


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_turns_that_extend_or_replace_a_conversation(models: Pair, mode: str) -> None:
    reused = check_turns(models, mode)
    assert reused[4] == 600


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_the_prompt_cache(models: Pair, mode: str, cache_folder: str) -> None:
    loaded = check_prompt_cache(models, mode, cache_folder)
    assert loaded == [LAST, 600, 600]


def test_stored_states_are_those_of_their_prompt(models: Pair, cache_folder: str) -> None:
    """Turns that follow while a prompt is being written, long or too short to keep a state."""
    options = {**SMALL, "link": "emulated:50", "prompt_cache": cache_folder}
    prompts = [DOCUMENT[:300]]
    write = offload.tiered.kv_file.KVFile.write

    def slowly(file: Any, read: Any) -> list[int]:
        time.sleep(0.05)
        return write(file, read)

    with (
        patch.object(offload.tiered.kv_file.KVFile, "write", slowly),
        models.engine("plain", **options) as engine,
        warnings.catch_warnings(),
        engine.conversation(room=2000),
    ):
        warnings.simplefilter("error")
        for count in (30, 200, 150, 25):
            answer = list(engine.generate(prompts[-1], NEW, GREEDY))
            turn = random_tokens(count, seed=count).tolist()
            prompts.append([*prompts[-1], *answer, *turn])
    for prompt, answer in zip(prompts, alone(models, prompts), strict=True):
        with models.engine("plain", **options) as engine:
            assert list(engine.generate(prompt, NEW, GREEDY)) == answer


def kept_states(cache: TieredCache) -> dict[tuple[int, int], Tensor]:
    """Return the states (Hv, Dk, Dv) that a cache keeps, by position and layer."""
    states = cache.recurrent
    assert states is not None
    heads, keys, values = states.shape.value_heads, states.shape.key_dim, states.shape.value_dim
    size = heads * keys * values
    return {
        (position, layer): states.memory_of(layer, position).flatten()[:size].view(heads, keys, -1)
        for position in states.positions
        for layer in states.shape.layers
    }


@pytest.mark.parametrize("seed", slow_except(range(6), 1))
def test_every_kept_state_is_that_of_its_position(
    checkpoint: Callable[..., Path], kind: dict[str, Any], cache_folder: str, seed: int
) -> None:
    """Turns that extend, cut and replace a conversation, in memory and through the disk."""
    folder, step = checkpoint(**{**kind, "max_position_embeddings": 4096}), 128
    models, draw = Pair(folder, folder), random.Random(seed)
    keep_every(models, step)
    prompt = random_tokens(draw.choice((300, 640, 700)), seed=seed).tolist()
    options = {**SMALL, "link": "emulated:50", "prompt_cache": cache_folder}
    for _ in range(2):
        with models.engine("retrieval", **options) as engine, engine.conversation(room=2000):
            for _ in range(4):
                answer = list(engine.generate(prompt, draw.choice((3, 40)), GREEDY))
                (kept,) = engine.scheduler.caches.kept
                cache, tokens = kept.caches.target, torch.tensor([*prompt, *answer])
                for (position, layer), state in kept_states(cache).items():
                    fresh = resident(models.target, position)
                    with Prefill(fresh, position) as prefill:
                        models.target.prefill(tokens[:position], prefill, 64)
                    assert fresh.recurrent is not None
                    expected, _ = fresh.recurrent.state_of(layer)
                    torch.testing.assert_close(state, expected, atol=1e-3, rtol=1e-3)
                end = draw.choice((len(tokens), len(prompt), draw.randrange(200, len(prompt))))
                turn = random_tokens(draw.choice((5, 50, 130, 200)), seed=end).tolist()
                prompt = [*tokens[:end].tolist(), *turn]
        prompt = prompt[: draw.randrange(200, len(prompt) + 1)]


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
    _, reused = check_swapped_out(models)
    assert reused == [LAST, 600]


def test_batches(models: Pair) -> None:
    check_batches(models)
