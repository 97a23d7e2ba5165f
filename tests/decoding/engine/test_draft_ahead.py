"""Drafts that continue while a verification waits for the link, and verifications of one request
while another drafts, change no token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import GREEDY, Engine, Sampling
from decoding.engine.request import Request
from offload.errors import InvalidRequestError
from offload.tiered.cache import TieredCache
from parallel.execution.executor import TensorParallelExecutor
from parallel.execution.layered_forward import LayeredForward
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import SMALL, requests, run_alone, run_batch, tokens
from support.engines import Pair, lead
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

MODES = ["retrieval", "speculative", "hierarchical"]
SPLIT_MODES = ["split", "split-retrieval", "split-speculative", "split-hierarchical"]
# drafts of fixed lengths, many of which are accepted as a whole
AHEAD: dict[str, Any] = {
    **SMALL,
    "draft_ahead": True,
    "num_draft_tokens": 2,
    "retrieval_budget": 128,
    "link": "emulated:50",
    "gpu_kv_layers": 0,
}
SIZES = [(300, 40), (290, 30), (310, 35)]
DETERMINISTIC = {"deterministic": True}


def wait_at_random() -> property:
    """Return in place of `LayeredForward.has_arrived` one that often says no."""
    rng = random.Random(0)
    return property(lambda forward: rng.random() < 0.2)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifications wait for a link of any rate."""
    monkeypatch.setattr(LayeredForward, "has_arrived", wait_at_random())


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Pair:
    target = checkpoint(max_position_embeddings=4096)
    return Pair(target, target)


@pytest.fixture(scope="module")
def windowed(checkpoint: Callable[..., Path]) -> Pair:
    options = {"family": "gemma3_text", "sliding_window": 24, "max_position_embeddings": 4096}
    target = checkpoint(**options)
    return Pair(target, target)


@pytest.fixture(scope="module")
def halves(checkpoint: Callable[..., Path]) -> Pair:
    target = checkpoint(max_position_embeddings=4096)
    return Pair(target, target, dtype="bfloat16")


def run_ahead(engine: Engine, batch: list[Request], concurrency: int) -> list[list[int]]:
    """Return the tokens of requests; check that some were drafted ahead and, if possible, kept."""
    states = run_batch(engine, batch, concurrency)
    rounds = [stats for state in states for stats in state.stats.rounds]
    assert sum(stats.meanwhile for stats in rounds) > 10
    # on a random model, hardly any draft of a window of few tokens is accepted
    assert sum(stats.ahead for stats in rounds) > 0 or engine.runtime.settings.mode == "speculative"
    return tokens(states)


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_greedy_tokens_are_those_of_plain_decoding(mode: str, models: Pair) -> None:
    batch = requests(GREEDY, SIZES)
    with models.engine("plain", **SMALL) as engine:
        expected = run_alone(engine, batch)
    with models.engine(mode, **AHEAD) as engine:
        for concurrency in (1, 2, 3):
            assert run_ahead(engine, batch, concurrency) == expected


@pytest.mark.parametrize("mode", slow_except(MODES, -1))
def test_greedy_tokens_with_windows_are_those_of_plain_decoding(mode: str, windowed: Pair) -> None:
    batch = requests(GREEDY, SIZES)
    with windowed.engine("plain", **SMALL) as engine:
        expected = run_alone(engine, batch)
    with windowed.engine(mode, **AHEAD) as engine:
        for concurrency in (1, 2):
            assert run_ahead(engine, batch, concurrency) == expected


@pytest.mark.parametrize("mode", slow_except([*MODES, *SPLIT_MODES], -1))
@pytest.mark.parametrize("sampling", slow_except([GREEDY, Sampling(0.7, top_p=0.9, seed=3)], 1))
def test_deterministic_tokens_are_those_of_plain_decoding(
    mode: str, sampling: Sampling, halves: Pair
) -> None:
    batch = requests(sampling, SIZES[:2])
    with halves.engine("plain", **SMALL, **DETERMINISTIC) as engine:
        expected = run_alone(engine, batch)
    with halves.engine(mode, **AHEAD, **DETERMINISTIC) as engine:
        states = run_batch(engine, batch, 1)
        assert tokens(states) == expected
        assert sum(stats.meanwhile for each in states for stats in each.stats.rounds) > 10


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hierarchical", "retrieval"])
def test_two_ranks_equal_one(mode: str, checkpoint: Callable[..., Path], models: Pair) -> None:
    batch = requests(GREEDY, SIZES)
    with models.engine("plain", **SMALL) as engine:
        expected = run_alone(engine, batch)
    outputs, worker_outputs = run_ranks(
        2, generate_on_rank, checkpoint(max_position_embeddings=4096), mode
    )
    assert worker_outputs == []
    assert outputs == [expected, expected]


def generate_on_rank(target: Path, mode: str) -> list[list[list[int]]]:
    pytest.MonkeyPatch().setattr(LayeredForward, "has_arrived", wait_at_random())
    models = Pair(target, target, TensorParallelGroup.from_environment("cpu"))
    batch = requests(GREEDY, SIZES)
    with models.engine(mode, **AHEAD) as engine:
        both = lead(engine, lambda engine: [run_ahead(engine, batch, each) for each in (1, 2)])
    return both[0] if both else []


@pytest.mark.parametrize("concurrency", slow_except([1, 2], 1))
def test_requests_end_in_the_middle_of_a_verification(concurrency: int, models: Pair) -> None:
    batch = requests(GREEDY, SIZES[:2])
    with models.engine("hierarchical", **AHEAD) as engine:
        expected = run_alone(engine, batch)
        scheduler = engine.scheduler
        scheduler.concurrency = concurrency
        for _ in range(3):
            states = [scheduler.add(request) for request in batch]
            while not engine.sessions.executor.begun:
                scheduler.step()
            scheduler.abort(states[0])
            while not states[1].is_finished:
                scheduler.step()
            assert states[1].tokens == expected[1]
            assert states[0].tokens == expected[0][: len(states[0].tokens)]
            assert not engine.sessions.executor.begun
            states = [scheduler.add(request) for request in batch]
            while not engine.sessions.executor.begun:
                scheduler.step()
            scheduler.close()
            assert all(state.is_finished for state in states)
            assert not engine.sessions.executor.sequences
            scheduler.concurrency = concurrency
        assert run_alone(engine, batch) == expected


def test_a_conversation_continues_after_drafts_ahead(models: Pair) -> None:
    first, second = (random_tokens(count, seed=count).tolist() for count in (300, 20))
    outputs = []
    for options in ({**SMALL, "gpu_kv_layers": 0}, AHEAD):
        with models.engine("hierarchical", **options) as engine, engine.conversation():
            answer = list(engine.generate(first, 40, GREEDY))
            turn = list(engine.generate([*first, *answer, *second], 40, GREEDY))
            outputs.append((answer, turn))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "error", slow_except([InvalidRequestError("NaN"), torch.OutOfMemoryError("none")])
)
def test_an_error_in_a_draft_ahead_ends_that_alone(
    error: Exception, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = requests(GREEDY, SIZES)
    begin, begun = TensorParallelExecutor.begin_forward, list[bool]()

    def fail_in_waits(executor: TensorParallelExecutor, forwards: Any) -> LayeredForward:
        is_draft = not isinstance(forwards[0].cache, TieredCache)
        begun.append(is_draft)
        if is_draft and len(begun) % 3 == 0:
            raise error
        return begin(executor, forwards)

    with models.engine("hierarchical", **AHEAD) as engine:
        expected = run_alone(engine, batch)
        monkeypatch.setattr(TensorParallelExecutor, "begin_forward", fail_in_waits)
        assert tokens(run_batch(engine, batch[:1], 1)) == expected[:1]
    assert any(begun)


def test_an_error_in_a_verification_ends_its_requests_alone(
    models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request's draft goes on, that filled the verification's wait."""
    batch = requests(GREEDY, SIZES)
    run_layer, failed = LayeredForward.run_layer, list[int]()

    def fail_once(forward: LayeredForward) -> None:
        filling = engine.scheduler._forwards._filling
        is_verification = isinstance(forward.requests[0].cache, TieredCache)
        if is_verification and filling is not None and filling.requests and not failed:
            failed.append(len(forward.requests))
            raise InvalidRequestError("NaN in the logits")
        run_layer(forward)

    with models.engine("hierarchical", **AHEAD) as engine:
        expected = run_alone(engine, batch)
        monkeypatch.setattr(LayeredForward, "run_layer", fail_once)
        states = run_batch(engine, batch, 3)
        errors = [state.error for state in states]
        assert sum(error is not None for error in errors) == failed[0]
        for state, output in zip(states, expected, strict=True):
            assert state.error is not None or state.tokens == output


@pytest.mark.parametrize("options", [{"link": "view"}, {"draft_ahead": None}])
def test_nothing_is_drafted_ahead_without_waits_or_with_fixed_lengths(
    options: dict[str, Any], models: Pair
) -> None:
    with models.engine("retrieval", **{**AHEAD, **options}) as engine:
        (state,) = run_batch(engine, requests(GREEDY, SIZES[:1]), 1)
        assert all(stats.meanwhile == stats.ahead == 0 for stats in state.stats.rounds)
