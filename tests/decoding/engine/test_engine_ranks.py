"""Two ranks generate what one does, and continue in step after any request that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import decoding.models.runtime
import decoding.planning.plan
from decoding import GREEDY, Engine, Sampling
from decoding.planning.memory_plan import plan_memory
from offload.errors import InsufficientMemoryError, InvalidRequestError
from offload.tiered.resident import ResidentLayer
from parallel.model.layers import VocabParallelEmbedding
from parallel.model.loading import parameter_bytes
from parallel.ranks.process_group import TensorParallelGroup
from support import engines
from support.engines import MODES, Folders, Pair, lead
from support.models import random_tokens
from support.ranks import run_ranks

NEW = 16
DEEP = 8
FULL = Sampling(1.0, top_p=1, seed=3)
PROMPT, OTHER, LONG = (random_tokens(count, seed=count).tolist() for count in (300, 90, 2_000))
SMALL = {**engines.SMALL, "num_draft_tokens": 9, "gpu_kv_layers": 1, "link": "emulated:50"}
Report = dict[str, Any]


@pytest.fixture(scope="module")
def deep(checkpoint: Callable[..., Path]) -> Folders:
    """A deeper target, so that some of its layers can be offloaded."""
    return checkpoint(num_hidden_layers=DEEP, max_position_embeddings=4096), checkpoint(
        seed=1, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def one_rank(folders: Folders) -> dict[str, list[int]]:
    """What one rank generates in each mode."""
    pair = Pair(*folders)
    return {mode: pair.generate(mode, PROMPT, NEW, FULL, **SMALL) for mode in MODES}


@pytest.fixture(scope="module")
def reports(folders: Folders, deep: Folders) -> list[Report]:
    """The report of each of two ranks, which start once for all tests."""
    return run_ranks(2, report_on_rank, folders, deep)


class FakeGraph:
    """A stand-in for a captured CUDA graph."""

    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


def report_on_rank(folders: Folders, deep: Folders) -> Report:
    group = TensorParallelGroup.from_environment("cpu")
    pair = Pair(*folders, group)
    report: Report = {}
    for mode in MODES:
        with pair.engine(mode, **SMALL) as engine:
            report[mode] = lead(engine, generate)
    graph = FakeGraph()
    group.graph_capturer._graphs.add(graph)
    with pair.engine("hierarchical", **SMALL) as engine:
        report["closed"] = lead(engine, generate_after_closing)
    report["reset"] = graph.is_reset
    report["plans"] = plans_differ(Pair(*deep, group))
    report["fit"] = one_rank_too_small(pair)
    report["deferred"] = deferred_layers(pair)
    report["nan"] = nan_in_one_request(pair)  # the last, because it changes the weights
    return report


def generate(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, NEW, FULL))


def generate_after_closing(engine: Engine) -> list[list[int]]:
    """Return outputs after other requests that were closed after some tokens, or were invalid."""
    outputs = []
    for count in (1, 2, 9):
        for _ in islice(engine.generate(OTHER, NEW, GREEDY), count):
            pass
        with pytest.raises(InvalidRequestError):
            next(engine.generate([], NEW, GREEDY))
        outputs.append(generate(engine))
    return outputs


def plans_differ(pair: Pair) -> tuple[int, list[int]]:
    """Return the number of this rank's on-device layers, and the output.

    Rank 1's share just fits; rank 0 also holds the draft.
    """
    options = {"retrieval_budget": 32, "link": "emulated:50"}
    with pair.engine("hierarchical", **options) as engine:
        needed = (
            parameter_bytes(pair.target) + engine.runtime.plan(len(LONG), NEW).memory.device_bytes
        )
    room = pair.group.all_gather(torch.tensor([needed])).tolist()[1]
    with pair.engine("hierarchical", device_memory=room, **options) as engine:
        output = list(engine.generate(LONG, NEW, GREEDY))
        return engine.runtime.plan(len(LONG), NEW).memory.resident_layers, output


def one_rank_too_small(pair: Pair) -> list[str | list[int]]:
    """Return the errors of `plan` and `generate` while rank 1 has no host memory, and the output
    once it has.
    """
    results: list[str | list[int]] = []
    available = decoding.models.runtime.host_available
    with pair.engine("hierarchical", **SMALL) as engine:
        if pair.group.rank:
            decoding.models.runtime.host_available = lambda: 10_000
        for attempt in (
            lambda: engine.plan(len(PROMPT), NEW),
            lambda: list(engine.generate(PROMPT, NEW, FULL)),
        ):
            try:
                results.append(attempt())
            except InsufficientMemoryError as error:
                results.append(str(error))
        decoding.models.runtime.host_available = available
        results.append(list(engine.generate(PROMPT, NEW, FULL)))
    return results


def deferred_layers(pair: Pair) -> list[str | list[int]]:
    """Return the outputs of three requests whose on-device layer is deferred.

    For the second one, rank 1 fails to allocate the layer.
    """
    results = list[str | list[int]]()
    allocate = ResidentLayer._allocate

    def fail(layer: ResidentLayer) -> Tensor:
        raise torch.OutOfMemoryError("gone")

    with (
        patch.object(
            decoding.planning.plan,
            "plan_memory",
            lambda *args: replace(plan_memory(*args), deferred_layers=1),
        ),
        pair.engine("hierarchical", **SMALL) as engine,
    ):
        for fails in (False, True, False):
            with patch.object(
                ResidentLayer, "_allocate", fail if fails and pair.group.rank else allocate
            ):
                try:
                    results.append(list(engine.generate(PROMPT, NEW, FULL)))
                except InsufficientMemoryError as error:
                    results.append(str(error))
    return results


def nan_in_one_request(pair: Pair) -> list[str | list[int]]:
    """Return the outputs of a request, of one with a NaN embedding, and of the first again."""
    results: list[str | list[int]] = []
    with pair.engine("plain", **SMALL) as engine:
        results.append(list(engine.generate(OTHER, 5, GREEDY)))
        output = pair.group.broadcast(results[0])
        bad_token = next(token for token in range(101) if token not in {*OTHER, *output})
        set_nan(pair.target.embed, bad_token)
        for prompt in ([*OTHER, bad_token], OTHER):
            try:
                results.append(list(engine.generate(prompt, 5, GREEDY)))
            except InvalidRequestError as error:
                results.append(str(error))
    return results


def set_nan(embed: VocabParallelEmbedding, token: int) -> None:
    if embed.first <= token < embed.last:
        with torch.inference_mode():
            embed.weight.values[token - embed.first] = torch.nan


@pytest.mark.parametrize("mode", MODES)
def test_sampled_output_equals_one_rank(
    mode: str, reports: list[Report], one_rank: dict[str, list[int]]
) -> None:
    assert reports[0][mode] == [one_rank[mode]]


def test_closed_and_invalid_requests_do_not_affect_others(
    reports: list[Report], one_rank: dict[str, list[int]]
) -> None:
    assert reports[0]["closed"] == [[one_rank["hierarchical"]] * 3]


def test_closing_an_engine_resets_captured_graphs(reports: list[Report]) -> None:
    """Otherwise destroy_process_group would hang."""
    assert [report["reset"] for report in reports] == [True, True]


def test_ranks_may_have_different_on_device_layers(reports: list[Report], deep: Folders) -> None:
    (few, output), (many, _) = (report["plans"] for report in reports)
    assert 0 < few < many == DEEP
    assert output == Pair(*deep).generate("plain", LONG, NEW)


def test_errors_of_one_rank_are_raised_on_both(
    reports: list[Report], one_rank: dict[str, list[int]]
) -> None:
    (plan_error, error, output), (worker_error, *outputs) = (report["fit"] for report in reports)
    assert "host memory per rank" in plan_error
    assert plan_error == worker_error == error
    assert output == one_rank["hierarchical"]
    assert outputs == [[], []]


def test_nan_logits_fail_one_request(reports: list[Report]) -> None:
    first, error, again = reports[0]["nan"]
    assert "NaN in the logits" in error
    assert first == again


def test_a_failed_onload_fails_one_request(
    reports: list[Report], one_rank: dict[str, list[int]]
) -> None:
    first, error, again = reports[0]["deferred"]
    assert first == again == one_rank["hierarchical"]
    assert "another process took the device memory of 1 layers" in error
