"""Decoding with the target's own multi-token-prediction block as the draft.

Blocks of a contrived model predict perfectly if they read each token at its place, with the hidden
state of the token before it; then every draft token is accepted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from decoding import GREEDY, Engine, Sampling
from decoding.models.draft_prefill import prefill_predictor
from offload.cache.hidden_states import HiddenStates
from offload.cache.prediction import PredictionCache
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import requests, run_alone, run_batch, tokens
from support.engines import Pair, lead
from support.families import OTHERS
from support.models import random_tokens
from support.predictors import (
    CONTRIVED,
    ReferencePredictor,
    follow_a_permutation,
    prediction_cache,
    with_predictor,
)
from support.ranks import run_ranks
from support.shared_documents import (
    check_prompt_cache,
    check_questions,
    check_swapped_out,
    check_turns,
    keep_every,
)
from support.slow import slow_except

MODES = ["speculative", "hierarchical", "split-hierarchical"]
TIGHT: dict[str, Any] = {
    "retrieval_budget": 24,
    "chunk_size": 4,
    "window": 12,
    "num_draft_tokens": 7,
    "num_inner_draft_tokens": 3,
    "link": "emulated:50",
    "gpu_kv_layers": 0,
}
Checkpoints = Callable[..., Path]
Outcome = tuple[list[int], dict[str, float | None]]  # output, and acceptance rates


@pytest.fixture(scope="module")
def contrived(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models whose blocks read the token, or the hidden state."""
    parent, options = tmp_path_factory.mktemp("contrived"), {"max_position_embeddings": 4096}
    plain = checkpoint(**CONTRIVED, **options)
    return [
        with_predictor(plain, parent / reads, partial(follow_a_permutation, reads=reads))
        for reads in ("token", "state")
    ]


def prompt_of(count: int) -> list[int]:
    return random_tokens(count, CONTRIVED["vocab_size"]).tolist()


def check_accepted(rates: dict[str, float | None]) -> None:
    known = [rate for rate in rates.values() if rate is not None]
    assert known
    assert min(known) == 1.0, rates


@pytest.mark.parametrize("graphs", slow_except([False, True], 1))
@pytest.mark.parametrize("mode", slow_except(MODES, 1))
def test_perfect_predictions_are_accepted(contrived: list[Path], mode: str, graphs: bool) -> None:
    """After prompts shorter and longer than the window, at the first draft and after many."""
    for folder in contrived:
        options = {**TIGHT, "retrieval_budget": 4096, "graphs": graphs}
        with Pair(folder, None, dtype="bfloat16").engine(mode, **options) as engine:
            for count in (1, 2, 9, 70, 300):
                output = list(engine.generate(prompt_of(count), 90, GREEDY))
                assert len(set(output)) > 3
                check_accepted(engine.stats.acceptance)
                if graphs:
                    assert engine.stats.cuda_graphs is not None
                    assert engine.stats.cuda_graphs["refused"] == 0


def test_a_graph_that_leaves_no_hidden_states_is_refused(folder: Path) -> None:
    def capture(capturer: GraphCapturer, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def replay() -> Tensor:
            with patch.object(HiddenStates, "write_first"):
                return function()

        return replay

    with (
        patch.object(GraphCapturer, "capture", capture),
        Pair(folder, None).engine("hierarchical", **TIGHT, graphs=True) as engine,
    ):
        list(engine.generate(prompt_of(40), 10, GREEDY))
        counts = engine.stats.cuda_graphs
        assert counts is not None
        assert counts["replayed"] == 0
        assert "replayed logits off by 0, written KV off by 0, hidden states" in counts["why"]


@pytest.mark.parametrize("graphs", slow_except([False, True], 1))
@pytest.mark.parametrize("index", [0, 1])
def test_a_conversation_goes_on_with_perfect_predictions(
    contrived: list[Path], index: int, graphs: bool
) -> None:
    """Turns that extend it by little and by much, and that replace its end."""
    pair = Pair(contrived[index], None)
    keep_every(pair, 60)
    prompt = prompt_of(150)
    options = {**TIGHT, "graphs": graphs}
    with pair.engine("hierarchical", **options) as engine, engine.conversation(room=2000):
        for kept, count in ((None, 3), (None, 250), (120, 90), (None, 1), (60, 5)):
            answer = list(engine.generate(prompt, 40, GREEDY))
            check_accepted(engine.stats.acceptance)
            prompt = [*[*prompt, *answer][:kept], *prompt_of(count)]
        assert engine.stats.reused_tokens > 0


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = checkpoint(family="qwen3_5_text", max_position_embeddings=4096)
    return with_predictor(plain, tmp_path_factory.mktemp("predictors") / "random")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    """A target that keeps its states every few tokens, and a block that predicts badly."""
    pair = Pair(folder, None)
    keep_every(pair, 300)
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_greedy_output_is_that_of_plain_decoding(
    name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    pair = Pair(with_predictor(checkpoint(**OTHERS[name]), tmp_path / name), None)
    prompt = random_tokens(70).tolist()
    expected = pair.generate("plain", prompt, 40)
    for mode in MODES[:2]:
        assert pair.generate(mode, prompt, 40, **TIGHT) == expected, mode
        options = {**TIGHT, "num_draft_tokens": 200, "prompt_lookup_ngram": 2}
        assert pair.generate(mode, prompt, 40, **options) == expected, mode


@pytest.mark.parametrize("mode", slow_except(MODES, 1))
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_p=0.9, seed=3)])
def test_deterministic_output_is_that_of_plain_decoding(
    mode: str, sampling: Sampling, folder: Path
) -> None:
    pair, prompt = Pair(folder, None, dtype="bfloat16"), random_tokens(300).tolist()
    expected = pair.generate("plain", prompt, 40, sampling, deterministic=True)
    assert pair.generate(mode, prompt, 40, sampling, **TIGHT, deterministic=True) == expected


def test_requests_of_a_batch_are_as_alone(pair: Pair) -> None:
    batch = requests(GREEDY, [(40, 30), (200, 12), (5, 30)])
    for graphs in (False, True):
        with pair.engine("hierarchical", **TIGHT, graphs=graphs) as engine:
            together = tokens(run_batch(engine, batch, 3))
        with pair.engine("plain") as engine:
            assert together == run_alone(engine, batch)


def output_and_acceptance(engine: Engine) -> Outcome:
    return list(engine.generate(prompt_of(60), 40, GREEDY)), engine.stats.acceptance


def generate_on_rank(folders: list[Path]) -> list[Outcome]:
    group, outputs = TensorParallelGroup.from_environment("cpu"), list[Outcome]()
    for folder in folders:
        with Pair(folder, None, group).engine("hierarchical", **TIGHT) as engine:
            outputs += lead(engine, output_and_acceptance)
    return outputs


@pytest.mark.slow
def test_two_ranks(contrived: list[Path], folder: Path) -> None:
    folders = [*contrived, folder]
    outputs, others = run_ranks(2, generate_on_rank, folders)
    assert not others
    for (output, _), each in zip(outputs, folders, strict=True):
        assert output == Pair(each, None).generate("plain", prompt_of(60), 40)
    for _, rates in outputs[:2]:
        check_accepted(rates)


def test_tokens_are_read_again_once_the_target_has_read_them(folder: Path) -> None:
    """Of a draft's tokens, the first alone was read with a hidden state of the target.

    The window has slid by then.
    """
    options = {**TIGHT, "num_draft_tokens": 5}
    with (
        Pair(folder, None).engine("speculative", **options) as engine,
        engine.conversation(room=500),
    ):
        prompt = random_tokens(70).tolist()
        output = list(engine.generate(prompt, 120, GREEDY))
        (kept,) = engine.scheduler.caches.kept
        *_, level = kept.caches.levels
        cache, block = level.cache, level.model
        assert isinstance(cache, PredictionCache)
        assert cache.device_bytes == kept.caches.plan.breakdown[1]["draft cache"]
        read = [*prompt, *output][: cache.length]
        expected = prediction_cache(block, replace(cache.shape, window=512))
        hidden = ReferencePredictor(folder).hidden_states(torch.tensor(read))
        expected.hidden_states.record(hidden, 0)
        prefill_predictor(block, expected, torch.tensor(read))
        assert 1 < cache.oldest < cache.length - cache.shape.window
        first, _ = expected.slot_and_position(cache.oldest)
        tokens = cache.length - cache.oldest
        (kv, raw, *_), (whole, whole_raw, *_) = (each.buffers(0) for each in (cache, expected))
        assert raw is not None
        assert whole_raw is not None
        torch.testing.assert_close(kv[1, :, :tokens], whole[1, :, first : first + tokens])
        torch.testing.assert_close(raw[:, :tokens], whole_raw[:, first : first + tokens])
        keys = cache.rotary.keys(raw[:, :tokens].transpose(0, 1), 0, 0).transpose(0, 1)
        torch.testing.assert_close(kv[0, :, :tokens], keys)


@pytest.mark.parametrize("mode", slow_except(MODES[:2], -1))
def test_documents_and_turns(pair: Pair, mode: str, cache_folder: str) -> None:
    check_questions(pair, mode)
    check_turns(pair, mode)
    check_prompt_cache(pair, mode, cache_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_swapped_out(pair)
