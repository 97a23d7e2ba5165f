"""Two ranks write what one writes, and go on together after whatever stops a text."""

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
from decoding import GREEDY, Engine, Sampling
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
    """With a target of which the host may hold some layers to good effect."""
    return checkpoint(num_hidden_layers=DEEP, max_position_embeddings=4096), checkpoint(
        seed=1, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def alone(folders: Folders) -> dict[str, list[int]]:
    """What one rank writes in each mode."""
    pair = Pair(*folders)
    return {mode: pair.text(mode, PROMPT, NEW, FULL, **SMALL) for mode in MODES}


@pytest.fixture(scope="module")
def reports(folders: Folders, deep: Folders) -> list[Report]:
    """What each of two ranks found: they start once for all tests."""
    return run_ranks(2, on_a_rank, folders, deep)


class Recording:
    """What a recorder holds of a CUDA graph."""

    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


def on_a_rank(folders: Folders, deep: Folders) -> Report:
    group = TensorParallelGroup.from_environment("cpu")
    pair = Pair(*folders, group)
    report: Report = {}
    for mode in MODES:
        with pair.engine(mode, **SMALL) as engine:
            report[mode] = lead(engine, whole)
    recording = Recording()
    group.graph_capturer._graphs.add(recording)
    with pair.engine("hierarchical", **SMALL) as engine:
        report["given up"] = lead(engine, given_up)
    report["reset"] = recording.is_reset
    report["plans"] = plans_differ(Pair(*deep, group))
    report["fit"] = one_rank_too_small(pair)
    report["deferred"] = deferred_layers(pair)
    report["nan"] = nan_in_one_text(pair)  # the last, for it spoils the weights
    return report


def whole(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, NEW, FULL))


def given_up(engine: Engine) -> list[list[int]]:
    """Texts behind others that were given up after some tokens, or were refused."""
    texts = []
    for count in (1, 2, 9):
        for _ in islice(engine.generate(OTHER, NEW, GREEDY), count):
            pass
        with pytest.raises(InvalidRequestError):
            next(engine.generate([], NEW, GREEDY))
        texts.append(whole(engine))
    return texts


def plans_differ(pair: Pair) -> tuple[int, list[int]]:
    """How many layers stay on this rank, where rank 1's share just fits and rank 0 has the draft to
    hold too; and the text.
    """
    choices = {"retrieval_budget": 32, "link": "emulated:50"}
    with pair.engine("hierarchical", **choices) as engine:
        needed = parameter_bytes(pair.target) + engine.runtime.plan(len(LONG), NEW).device_bytes
    room = pair.group.all_gather(torch.tensor([needed])).tolist()[1]
    with pair.engine("hierarchical", device_memory=room, **choices) as engine:
        text = list(engine.generate(LONG, NEW, GREEDY))
        return engine.runtime.plan(len(LONG), NEW).resident_layers, text


def one_rank_too_small(pair: Pair) -> list[str | list[int]]:
    """What `check` and `generate` say while rank 1 has no host memory, and the text once it has."""
    found: list[str | list[int]] = []
    available = decoding.models.runtime.host_available
    with pair.engine("hierarchical", **SMALL) as engine:
        if pair.group.rank:
            decoding.models.runtime.host_available = lambda: 10_000
        for attempt in (
            lambda: engine.plan(len(PROMPT), NEW),
            lambda: list(engine.generate(PROMPT, NEW, FULL)),
        ):
            try:
                found.append(attempt())
            except InsufficientMemoryError as error:
                found.append(str(error))
        decoding.models.runtime.host_available = available
        found.append(list(engine.generate(PROMPT, NEW, FULL)))
    return found


def deferred_layers(pair: Pair) -> list[str | list[int]]:
    """A text whose resident layer comes late, one where rank 1 has no memory for it any more, and
    the first again.
    """
    planned, found = decoding.models.runtime.fit, list[str | list[int]]()
    layer = ResidentLayer._allocate

    def lost(layer: ResidentLayer) -> Tensor:
        raise torch.OutOfMemoryError("gone")

    with (
        patch.object(
            decoding.models.runtime, "fit", lambda *text: replace(planned(*text), deferred_layers=1)
        ),
        pair.engine("hierarchical", **SMALL) as engine,
    ):
        for without in (False, True, False):
            with patch.object(
                ResidentLayer, "_allocate", lost if without and pair.group.rank else layer
            ):
                try:
                    found.append(list(engine.generate(PROMPT, NEW, FULL)))
                except InsufficientMemoryError as error:
                    found.append(str(error))
    return found


def nan_in_one_text(pair: Pair) -> list[str | list[int]]:
    """A text, one with a token whose embedding becomes NaN, and the first again."""
    found: list[str | list[int]] = []
    with pair.engine("plain", **SMALL) as engine:
        found.append(list(engine.generate(OTHER, 5, GREEDY)))
        spoilt = next(
            token for token in range(101) if token not in {*OTHER, *pair.group.broadcast(found[0])}
        )
        spoil(pair.target.embed, spoilt)
        for prompt in ([*OTHER, spoilt], OTHER):
            try:
                found.append(list(engine.generate(prompt, 5, GREEDY)))
            except InvalidRequestError as error:
                found.append(str(error))
    return found


def spoil(embed: VocabParallelEmbedding, token: int) -> None:
    if embed.first <= token < embed.last:
        with torch.inference_mode():
            embed.weight[token - embed.first] = torch.nan


@pytest.mark.parametrize("mode", MODES)
def test_sampled_text_is_that_of_one_rank(
    mode: str, reports: list[Report], alone: dict[str, list[int]]
) -> None:
    assert reports[0][mode] == [alone[mode]]


def test_texts_given_up_or_refused_leave_no_trace(
    reports: list[Report], alone: dict[str, list[int]]
) -> None:
    assert reports[0]["given up"] == [[alone["hierarchical"]] * 3]


def test_no_recording_stays_once_an_engine_is_closed(reports: list[Report]) -> None:
    """destroy_process_group would hang."""
    assert [report["reset"] for report in reports] == [True, True]


def test_ranks_may_keep_different_layers(reports: list[Report], deep: Folders) -> None:
    (few, text), (many, _) = (report["plans"] for report in reports)
    assert 0 < few < many == DEEP
    assert text == Pair(*deep).text("plain", LONG, NEW)


def test_what_does_not_fit_one_rank_is_raised_on_both(
    reports: list[Report], alone: dict[str, list[int]]
) -> None:
    (checked, generated, text), (checked_there, *followed) = (report["fit"] for report in reports)
    assert "host memory per rank" in checked
    assert checked == checked_there == generated
    assert text == alone["hierarchical"]
    assert followed == [[], []]


def test_a_nan_fails_its_text_alone(reports: list[Report]) -> None:
    first, failed, again = reports[0]["nan"]
    assert "NaN in the logits" in failed
    assert first == again


def test_a_layer_that_finds_its_memory_gone_fails_its_text_alone(
    reports: list[Report], alone: dict[str, list[int]]
) -> None:
    first, failed, again = reports[0]["deferred"]
    assert first == again == alone["hierarchical"]
    assert "another process took the device memory of 1 layers" in failed
