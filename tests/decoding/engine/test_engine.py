"""One engine, text after text: what it writes depends on the prompt, the sampling and the mode, and
on nothing else.
"""

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
    """The target's own greedy text behind PROMPT."""
    return pair.text("plain", PROMPT, 100)


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
@pytest.mark.parametrize(
    "sampling", slow_except([FULL, Sampling(0.6, top_p=0.9, seed=6)]), ids=["full", "nucleus"]
)
def test_memory_and_link_do_not_change_a_sampled_text(
    mode: str, sampling: Sampling, pair: Pair
) -> None:
    places: list[dict[str, Any]] = [
        {"gpu_kv_layers": 0},
        {"gpu_kv_layers": 2, "link": "emulated:50"},
        {"gpu_kv_layers": 0, "link": "emulated:50", "prefill_chunk": 45},
    ]
    want = pair.text(mode, PROMPT, 40, sampling, **SMALL)
    assert len(set(want)) > 10
    for place in places:
        assert pair.text(mode, PROMPT, 40, sampling, **SMALL, **place) == want


@pytest.mark.parametrize("mode", MODES)
def test_the_seed_makes_a_text(mode: str, pair: Pair) -> None:
    with pair.engine(mode, **SMALL) as engine:
        first, other, again = (
            list(engine.generate(PROMPT, 40, Sampling(1.0, top_p=1, seed=seed)))
            for seed in (1, 2, 1)
        )
    assert first == again
    assert first != other


# around the sinks, the chunk, the window and the budget: sizes at which some part of some cache is
# empty
PROMPT_LENGTHS = [*range(1, 10), 14, 15, 31, 32, 33, 80]


@pytest.fixture(scope="module")
def greedy_by_transformers(target: Path) -> dict[int, list[int]]:
    """What transformers writes behind a prompt of each length."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    texts = {}
    for length in PROMPT_LENGTHS:
        prompt = torch.tensor([PROMPT[:length]])
        text = model.generate(prompt, max_new_tokens=24, do_sample=False)
        texts[length] = text[0, length:].tolist()
    return texts


@pytest.mark.parametrize("mode", slow_except(MODES, 1, -1))
@pytest.mark.parametrize("prompt", slow_except(PROMPT_LENGTHS, 0, 1, 3, 10, 12, 14))
def test_prompts_from_one_token_up(
    mode: str, prompt: int, pair: Pair, greedy_by_transformers: dict[int, list[int]]
) -> None:
    found = pair.text(mode, PROMPT[:prompt], 24, gpu_kv_layers=1, **SMALL)
    assert found == greedy_by_transformers[prompt]


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
    # it slides amid a draft, of which verification then takes back most
    lengths = {
        "num_draft_tokens": num_draft_tokens,
        "num_inner_draft_tokens": num_inner_draft_tokens,
    }
    found = pair.text(
        mode, PROMPT, new, retrieval_budget=16, chunk_size=4, window=1, sinks=1, **lengths
    )
    assert found == plain[:new]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("new", slow_except([1, 2, 3, 7, 8], 0, 1, 3))
def test_a_text_has_the_length_asked_for(mode: str, new: int, pair: Pair, plain: list[int]) -> None:
    with pair.engine(mode, **SMALL) as engine:
        assert list(engine.generate(PROMPT, new, GREEDY)) == plain[:new]
        assert engine.stats.new_tokens == new
        assert engine.stats.finish_reason == "length"


@pytest.mark.parametrize("mode", slow_except(MODES, 0, -1))
def test_a_stop_token_ends_the_text_and_is_no_part_of_it(mode: str, pair: Pair) -> None:
    whole = pair.text(mode, PROMPT, 24, FULL, **SMALL)
    for place in (*range(8), 15, 23):  # anywhere in a round, and far behind the prompt
        before = whole[:place]
        if whole[place] in before:
            continue
        with pair.engine(mode, stop=[whole[place], 1000], **SMALL) as engine:
            assert list(engine.generate(PROMPT, 24, FULL)) == before
            assert engine.stats.finish_reason == "stop"
            assert engine.stats.new_tokens == place


def test_a_stop_token_amid_a_round_ends_it_there(target: Path) -> None:
    with Pair(target, target).engine("speculative", num_draft_tokens=9, window=300) as engine:
        whole = list(engine.generate(PROMPT, 40, FULL))
        # a draft by the target itself: rounds of 10, behind the first token
        assert engine.stats.levels[0].stats.forwards == 4
    amid = next(place for place in range(2, 9) if whole[place] not in whole[:place])
    with Pair(target, target).engine(
        "speculative", stop=[whole[amid]], num_draft_tokens=9, window=300
    ) as engine:
        assert list(engine.generate(PROMPT, 40, FULL)) == whole[:amid]
        assert engine.stats.levels[0].stats.produced == 10


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_a_text_given_up_leaves_no_trace(mode: str, pair: Pair) -> None:
    choices = {**SMALL, "gpu_kv_layers": 1, "link": "emulated:50"}
    want = pair.text(mode, PROMPT, 40, FULL, **choices)
    with pair.engine(mode, **choices) as engine:
        for given_up in (1, 2, 11):
            for count, _ in enumerate(engine.generate(OTHER, 40, GREEDY), start=1):
                if count == given_up:
                    break
            assert engine.stats.finish_reason is None
            assert engine.stats.new_tokens == given_up
            assert list(engine.generate(PROMPT, 40, FULL)) == want


def test_texts_do_not_mix(pair: Pair) -> None:
    # they share one host arena: a second text would overwrite the first one's KV
    want = pair.text("hierarchical", PROMPT, 30, gpu_kv_layers=0)
    with pair.engine("hierarchical", gpu_kv_layers=0) as engine:
        text = engine.generate(PROMPT, 30, GREEDY)
        found = [next(text), next(text)]
        with pytest.raises(TierForceError, match="one text at a time"):
            next(engine.generate(OTHER, 30, GREEDY))
        assert [*found, *text] == want
        assert list(engine.generate(PROMPT, 30, GREEDY)) == want


def test_a_string_is_its_tokens() -> None:
    engine = Engine.from_pretrained(
        DEMO / "target", settings=Settings(dtype="float32"), group=TensorParallelGroup()
    )
    text = "The sun was low over the hills, and nobody spoke."
    assert list(engine.generate(text, 12, GREEDY)) == list(
        engine.generate(engine.tokenizer(text).input_ids, 12, GREEDY)
    )
    assert engine.stats.prompt_tokens == len(engine.tokenizer(text).input_ids) > 5
    engine.close()


def test_draft_lengths_are_learnt_from_text_to_text(pair: Pair) -> None:
    with pair.engine("speculative") as engine:
        list(engine.generate(PROMPT, 24, FULL))
        length, *_ = engine.lengths["speculative"]
        assert isinstance(length, Adaptive)
        learnt = length.acceptance
        assert learnt != pytest.approx(Adaptive(MAX_DRAFT).acceptance)
        list(engine.generate(OTHER, 1, FULL))  # no round: nothing new to learn
        assert length.acceptance == pytest.approx(learnt)
