"""Captured graphs match a CPU: NoPE layers, partial rotary factors, windows, and experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.harness.decode_loop import run_together
from decoding import GREEDY
from decoding.engine.request import Request
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import serving
from support.captures import streaming_cache
from support.engines import Pair
from support.families import OTHERS
from support.models import random_tokens
from support.predictors import CONTRIVED, follow_a_permutation, with_predictor
from support.shared_documents import keep_every
from support.slow import slow_except

pytestmark = pytest.mark.cuda
PROMPT, NEW = random_tokens(70).tolist(), 12
CHOICES = {"retrieval_budget": 24, "chunk_size": 4, "window": 32, "sinks": 2, "num_draft_tokens": 5}


def test_experts_are_captured_with_static_shapes_only(
    checkpoint: Callable[..., Path],
) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    model = load_model(checkpoint(**OTHERS["qwen3_moe"]), group, "float32")
    runner = GraphRunner(True, group.graph_capturer)
    caches = [streaming_cache(model) for _ in range(5)]
    for slot, cache in enumerate(caches):
        runner.capture(model, cache, [9, 17], slot)
    for count in (9, 17, 17, 9):
        tokens = random_tokens(count).to(group.device)
        runner.run([ForwardRequest(model, cache, tokens, 1) for cache in caches])
        for cache in caches:
            cache.advance(1)
    assert group.graph_capturer.broken is None
    # each alone; up to five of 9 tokens, and up to three of 17
    assert (runner.counts["replayed"], runner.counts["refused"]) == (10 + 4 + 2, 0)


@pytest.mark.parametrize(
    "name",
    slow_except(
        [
            "smollm3",
            "phi3",
            "gemma3_text",
            "ministral3",
            "glm4",
            "qwen3_moe",
            "qwen3_5",
            "qwen3_next",
            "hunyuan",
            "granite-mamba",
            "granite-experts",
            "nemotron_h",
        ],
        6,
    ),
)
def test_captured_graphs_match_the_cpu(name: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(**OTHERS[name])
    expected = Pair(folder, folder).generate("plain", PROMPT, NEW)
    pair = Pair(folder, folder, TensorParallelGroup(device=torch.device("cuda", 0)))
    with pair.engine("hierarchical", num_inner_draft_tokens=2, graphs=True, **CHOICES) as engine:
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == expected
        counts = engine.stats.cuda_graphs
        assert counts is not None
        assert counts["replayed"] > 0
        assert (counts["refused"], counts["why"]) == (0, None)


@pytest.mark.parametrize("reads", slow_except(["token", "state"], 1))
def test_a_perfect_prediction_block_drafts_in_graphs(
    reads: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    edit = partial(follow_a_permutation, reads=reads)
    folder = with_predictor(checkpoint(**CONTRIVED), tmp_path / reads, edit)
    prompt = random_tokens(70, CONTRIVED["vocab_size"]).tolist()
    expected = Pair(folder, None).generate("plain", prompt, 40)
    pair = Pair(folder, None, TensorParallelGroup(device=torch.device("cuda", 0)))
    with pair.engine("hierarchical", num_inner_draft_tokens=3, graphs=True, **CHOICES) as engine:
        assert list(engine.generate(prompt, 40, GREEDY)) == expected
        counts = engine.stats.cuda_graphs
        assert counts is not None
        assert counts["replayed"] > 2
        assert (counts["refused"], counts["why"]) == (0, None)
        assert set(engine.stats.acceptance.values()) == {1.0}


@pytest.mark.parametrize(
    ("name", "modes"),
    slow_except([("qwen3_5", ("retrieval", "hierarchical")), ("gemma3_text", ("retrieval",))], 1),
)
def test_what_is_kept_is_copied_to_the_host_and_back(
    name: str, modes: tuple[str, ...], checkpoint: Callable[..., Path]
) -> None:
    """Requests share a document up to where recurrent states are kept, or windows."""
    folder = checkpoint(**OTHERS[name])
    document = random_tokens(350, seed=4).tolist()
    prompts = [[*document, *random_tokens(count, seed=count).tolist()] for count in (120, 110, 100)]
    pair = Pair(folder, folder, TensorParallelGroup(device=torch.device("cuda", 0)))
    keep_every(pair, 100)
    options = {**CHOICES, "gpu_kv_layers": 0, "graphs": True}
    for mode in modes:
        with serving(pair, mode, 2, **options) as engine:
            states = run_together(engine, [Request(each, NEW, GREEDY) for each in prompts])
            assert min(state.stats.reused_tokens for state in states[1:]) >= 300
        for state, prompt in zip(states, prompts, strict=True):
            assert state.tokens == Pair(folder, folder).generate("plain", prompt, NEW)
