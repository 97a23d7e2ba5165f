"""One engine, request after request: the output depends on prompt, sampling and mode alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding import GREEDY, Engine, Sampling, Settings
from decoding.config.defaults import MAX_DRAFT
from decoding.speculation.draft_length import Adaptive
from offload.errors import TierForceError
from parallel.ranks.process_group import TensorParallelGroup
from support import engines
from support.engines import DEMO, MODES, Pair
from support.models import random_tokens
from support.slow import slow_except

SMALL = {**engines.SMALL, "selection_interval": 1}
FULL = Sampling(1.0, top_p=1, seed=5)
PROMPT = random_tokens(90).tolist()
OTHER = random_tokens(140, seed=1).tolist()


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(max_position_embeddings=4096)


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path], target: Path) -> Pair:
    return Pair(target, checkpoint(seed=1, num_hidden_layers=1))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[int]:
    """The target's own greedy output after PROMPT."""
    return pair.generate("plain", PROMPT, 100)


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize(
    "sampling", slow_except([FULL, Sampling(0.6, top_p=0.9, seed=6)]), ids=["full", "nucleus"]
)
def test_memory_and_link_do_not_change_sampled_output(
    mode: str, sampling: Sampling, pair: Pair
) -> None:
    placements: list[dict[str, Any]] = [
        {"gpu_kv_layers": 0},
        {"gpu_kv_layers": 2, "link": "emulated:50"},
        {"gpu_kv_layers": 0, "link": "emulated:50", "prefill_chunk": 45},
    ]
    expected = pair.generate(mode, PROMPT, 40, sampling, **SMALL)
    assert len(set(expected)) > 10
    for placement in placements:
        assert pair.generate(mode, PROMPT, 40, sampling, **SMALL, **placement) == expected


@pytest.mark.parametrize("mode", MODES)
def test_the_seed_determines_the_output(mode: str, pair: Pair) -> None:
    with pair.engine(mode, **SMALL) as engine:
        first, other, again = (
            list(engine.generate(PROMPT, 40, Sampling(1.0, top_p=1, seed=seed)))
            for seed in (1, 2, 1)
        )
    assert first == again
    assert first != other


# around the sizes of sinks, chunk, window and budget, at which some part of a cache is empty
PROMPT_LENGTHS = [*range(1, 10), 14, 15, 31, 32, 33, 80]


@pytest.fixture(scope="module")
def greedy_by_transformers(target: Path) -> dict[int, list[int]]:
    """What transformers generates after a prompt of each length."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs = {}
    for length in PROMPT_LENGTHS:
        prompt = torch.tensor([PROMPT[:length]])
        tokens = model.generate(prompt, max_new_tokens=24, do_sample=False)
        outputs[length] = tokens[0, length:].tolist()
    return outputs


@pytest.mark.parametrize("mode", slow_except(MODES, 1, -1))
@pytest.mark.parametrize("prompt", slow_except(PROMPT_LENGTHS, 0, 1, 3, 10, 12, 14))
def test_short_prompts(
    mode: str, prompt: int, pair: Pair, greedy_by_transformers: dict[int, list[int]]
) -> None:
    output = pair.generate(mode, PROMPT[:prompt], 24, gpu_kv_layers=1, **SMALL)
    assert output == greedy_by_transformers[prompt]


@pytest.mark.parametrize("mode", ["speculative", "hierarchical"])
@pytest.mark.parametrize(
    ("num_draft_tokens", "num_inner_draft_tokens", "new"),
    slow_except([(20, 2, 60), (70, 1, 30), (3, 40, 60)], 2),
)
def test_a_window_shorter_than_a_draft(
    mode: str,
    num_draft_tokens: int,
    num_inner_draft_tokens: int,
    new: int,
    pair: Pair,
    plain: list[int],
) -> None:
    # the window slides within a draft, most of which verification rejects
    lengths = {
        "num_draft_tokens": num_draft_tokens,
        "num_inner_draft_tokens": num_inner_draft_tokens,
    }
    output = pair.generate(
        mode, PROMPT, new, retrieval_budget=16, chunk_size=4, window=1, sinks=1, **lengths
    )
    assert output == plain[:new]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("new", slow_except([1, 2, 3, 7, 8], 0, 1, 3))
def test_output_has_the_requested_length(mode: str, new: int, pair: Pair, plain: list[int]) -> None:
    with pair.engine(mode, **SMALL) as engine:
        assert list(engine.generate(PROMPT, new, GREEDY)) == plain[:new]
        assert engine.stats.new_tokens == new
        assert engine.stats.finish_reason == "length"


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_a_stop_token_ends_the_output_and_is_excluded(mode: str, pair: Pair) -> None:
    whole = pair.generate(mode, PROMPT, 24, FULL, **SMALL)
    for index in (*range(8), 15, 23):  # anywhere in a round, and in later rounds
        prefix = whole[:index]
        if whole[index] in prefix:
            continue
        with pair.engine(mode, stop=[whole[index], 1000], **SMALL) as engine:
            assert list(engine.generate(PROMPT, 24, FULL)) == prefix
            assert engine.stats.finish_reason == "stop"
            assert engine.stats.new_tokens == index


def test_a_stop_token_inside_a_round(target: Path) -> None:
    with Pair(target, target).engine("speculative", num_draft_tokens=9, window=300) as engine:
        whole = list(engine.generate(PROMPT, 40, FULL))
        # the target drafts for itself: rounds of 10 after the first token
        assert engine.stats.levels[0].stats.forwards == 4
    stop = next(index for index in range(2, 9) if whole[index] not in whole[:index])
    with Pair(target, target).engine(
        "speculative", stop=[whole[stop]], num_draft_tokens=9, window=300
    ) as engine:
        assert list(engine.generate(PROMPT, 40, FULL)) == whole[:stop]
        assert engine.stats.levels[0].stats.produced == 10


def test_a_closed_engine_takes_no_requests(pair: Pair) -> None:
    with pair.engine("plain", **SMALL) as engine:
        engine.close()
        with pytest.raises(TierForceError, match="the engine is closed"):
            next(engine.generate(PROMPT, 8, GREEDY))


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_a_closed_generator_does_not_affect_later_requests(mode: str, pair: Pair) -> None:
    options = {**SMALL, "gpu_kv_layers": 1, "link": "emulated:50"}
    expected = pair.generate(mode, PROMPT, 40, FULL, **options)
    with pair.engine(mode, **options) as engine:
        for limit in (1, 2, 11):
            for count, _ in enumerate(engine.generate(OTHER, 40, GREEDY), start=1):
                if count == limit:
                    break
            assert engine.stats.finish_reason is None
            assert engine.stats.new_tokens == limit
            assert list(engine.generate(PROMPT, 40, FULL)) == expected


def test_requests_do_not_overlap(pair: Pair) -> None:
    # requests share one host arena: a second one would overwrite the first one's KV
    expected = pair.generate("hierarchical", PROMPT, 30, gpu_kv_layers=0)
    with pair.engine("hierarchical", gpu_kv_layers=0) as engine:
        tokens = engine.generate(PROMPT, 30, GREEDY)
        first = [next(tokens), next(tokens)]
        with pytest.raises(TierForceError, match="one request at a time"):
            next(engine.generate(OTHER, 30, GREEDY))
        assert [*first, *tokens] == expected
        assert list(engine.generate(PROMPT, 30, GREEDY)) == expected


def test_a_string_prompt_equals_its_tokens() -> None:
    engine = Engine.from_pretrained(
        DEMO / "target", settings=Settings(dtype="float32"), group=TensorParallelGroup()
    )
    prompt = "The sun was low over the hills, and no one spoke."
    assert list(engine.generate(prompt, 12, GREEDY)) == list(
        engine.generate(engine.tokenizer(prompt).input_ids, 12, GREEDY)
    )
    assert engine.stats.prompt_tokens == len(engine.tokenizer(prompt).input_ids) > 5
    engine.close()


def test_draft_lengths_adapt_over_requests(pair: Pair) -> None:
    with pair.engine("speculative") as engine:
        list(engine.generate(PROMPT, 24, FULL))
        length, *_ = engine.scheduler.lengths["speculative"]
        assert isinstance(length, Adaptive)
        adapted = length.acceptance
        assert adapted != pytest.approx(Adaptive(MAX_DRAFT).acceptance)
        list(engine.generate(OTHER, 1, FULL))  # one token takes no round
        assert length.acceptance == pytest.approx(adapted)
