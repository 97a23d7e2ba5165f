"""Split modes' long drafts are verified in one forward each, with the output of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding import GREEDY, Engine, Sampling
from decoding.config import settings
from decoding.config.defaults import MAX_DRAFT, MAX_SPLIT_DRAFT
from decoding.engine.levels import DecodingLevels, SequenceSlot
from decoding.planning.plan import Plan
from decoding.planning.request_spec import RequestSpec
from decoding.speculation.draft_length import Adaptive
from offload.cache.streaming import StreamingCache
from parallel.execution.cuda_graphs import GraphRunner
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import Folders, Pair, lead
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

NEW = 400
PROMPT = random_tokens(300, seed=8).tolist()
SAMPLED = Sampling(0.8, top_p=0.9, seed=3)
# a retrieval cache with room for most of the context, whose drafts are often accepted
COMMON: dict[str, Any] = {"chunk_size": 4, "retrieval_budget": 1024, "deterministic": True}
RESIDENT: dict[str, Any] = {"gpu_kv_layers": 1, "split_kv_layers": 2, "link": "emulated:50"}
OFFLOADED: dict[str, Any] = {**RESIDENT, "gpu_kv_layers": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("split-hierarchical", OFFLOADED),
    ("split-hierarchical", {**RESIDENT, "link": "view"}),
    ("split-speculative", RESIDENT),
    ("split-retrieval", OFFLOADED),
    ("split", {**RESIDENT, "prompt_lookup_ngram": 0}),  # one token per forward
    ("split", OFFLOADED),
]


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> Folders:
    """Return a target that is its own draft model."""
    target = checkpoint(num_hidden_layers=3, max_position_embeddings=4096)
    return target, target


@pytest.fixture(scope="module")
def models(folders: Folders) -> Pair:
    return Pair(*folders, dtype="bfloat16")


@pytest.fixture(scope="module")
def plain(models: Pair) -> list[int]:
    """Return the tokens of plain decoding."""
    tokens = models.generate("plain", PROMPT, NEW, SAMPLED, deterministic=True)
    assert len(set(tokens)) > 40
    return tokens


def longest_drafts(engine: Engine) -> tuple[int, int]:
    """Return the most draft tokens of a round of the last request, and the most accepted ones."""
    rounds = engine.stats.rounds
    return max(each.drafted for each in rounds), max(each.accepted for each in rounds)


@pytest.mark.slow
@pytest.mark.parametrize("length", [256, 128])
@pytest.mark.parametrize(("mode", "options"), CASES)
def test_output_is_that_of_plain_decoding(
    mode: str, options: dict[str, Any], length: int, models: Pair, plain: list[int]
) -> None:
    with models.engine(mode, num_draft_tokens=length, **COMMON, **options) as engine:
        assert list(engine.generate(PROMPT, NEW, SAMPLED)) == plain
        drafted, accepted = longest_drafts(engine)
        assert drafted == length
        assert accepted > MAX_DRAFT


@pytest.mark.parametrize("length", slow_except([MAX_SPLIT_DRAFT, 256]))
def test_adaptive_drafts_reach_the_maximum_of_their_mode(
    length: int, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers are resident: no draft token is rejected. Adapted lengths depend on times."""
    monkeypatch.setattr(settings, "MAX_SPLIT_DRAFT", length)
    monkeypatch.setattr(Adaptive, "next", lambda own: own.max_length)
    expected = models.generate("plain", PROMPT, NEW, GREEDY, deterministic=True)
    for mode, longest in (("split", length), ("retrieval", MAX_DRAFT)):
        with models.engine(mode, gpu_kv_layers=3, **COMMON) as engine:
            assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
            assert longest_drafts(engine) == (longest, longest)


def test_a_slot_keeps_no_draft_cache_that_is_too_small(models: Pair) -> None:
    """It is kept for requests of one mode: in another one, longer drafts may be rejected."""
    with models.engine("hierarchical", link="emulated:50") as engine:
        runtime, caches = engine.runtime, list[StreamingCache | None]()
        needs, captures = runtime.requirements, GraphRunner(True, engine.group.graph_capturer)
        slot = SequenceSlot(runtime.arena, captures)
        for mode in ("hierarchical", "hierarchical", "split-hierarchical"):
            strategy = replace(needs.strategy, mode=mode)
            spec = RequestSpec(needs.with_strategy(strategy), 100, 50)
            DecodingLevels(runtime, Plan.place(spec, runtime.memory()), slot)
            caches.append(slot.draft)
    first, same, longer = caches
    assert first is same is not longer
    assert longer is not None
    assert longer.shape.rewind == MAX_SPLIT_DRAFT + 2


@pytest.mark.slow
def test_two_ranks(folders: Folders) -> None:
    """Their sums round otherwise than those of one rank."""
    expected, *outputs = run_ranks(2, generate_on_rank, folders)[0]
    assert outputs == [expected]


def generate_on_rank(folders: Folders) -> list[list[int]]:
    models = Pair(*folders, TensorParallelGroup.from_environment("cpu"), dtype="bfloat16")
    outputs = []
    for mode, options in (("plain", {}), ("split-hierarchical", OFFLOADED)):
        with models.engine(mode, num_draft_tokens=128, **COMMON, **options) as engine:
            outputs += lead(engine, lambda first: list(first.generate(PROMPT, NEW, SAMPLED)))
    return outputs
