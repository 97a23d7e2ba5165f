"""Captured graphs match a CPU: with layers without RoPE, partial rotary factors, and experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding import GREEDY
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.captures import streaming_cache
from support.engines import Pair
from support.families import OTHERS
from support.models import random_tokens
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
    "name", slow_except(["smollm3", "phi3", "ministral3", "glm4", "qwen3_moe"], 1, 2)
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
