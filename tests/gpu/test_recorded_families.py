"""Recorded passes write what a CPU writes: with layers that skip RoPE, heads of which a part turns,
and experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import parallel.execution.cuda_graphs
from decoding import GREEDY
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import Pair
from support.families import OTHERS
from support.models import random_tokens
from support.recording import streaming
from support.slow import slow_except

pytestmark = pytest.mark.cuda
PROMPT, NEW = random_tokens(70).tolist(), 12
CHOICES = {"retrieval_budget": 24, "chunk_size": 4, "window": 32, "sinks": 2, "num_draft_tokens": 5}


def test_experts_are_recorded_as_long_as_the_host_need_not_know_the_choice(
    checkpoint: Callable[..., Path],
) -> None:
    group = TensorParallelGroup(device=torch.device("cuda", 0))
    model = load_model(checkpoint(**OTHERS["qwen3_moe"]), group, "float32")
    runner, caches = (
        GraphRunner(True, group.graph_capturer, 1),
        [streaming(model) for _ in range(5)],
    )
    for count in (9, 17, 17, 9):
        tokens = random_tokens(count).to(group.device)
        runner.run([ForwardRequest(model, cache, tokens, 1) for cache in caches])
        for cache in caches:
            cache.advance(1)
    assert group.graph_capturer.broken is None
    assert (runner.counts["replayed"], runner.counts["refused"]) == (1, 0)


@pytest.mark.parametrize("name", slow_except(["smollm3", "phi3", "qwen3_moe"], 1))
def test_recorded_passes_write_what_a_cpu_writes(
    name: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
    folder = checkpoint(**OTHERS[name])
    wanted = Pair(folder, folder).generate("plain", PROMPT, NEW)
    pair = Pair(folder, folder, TensorParallelGroup(device=torch.device("cuda", 0)))
    with pair.engine("hierarchical", num_inner_draft_tokens=2, graphs=True, **CHOICES) as engine:
        assert list(engine.generate(PROMPT, NEW, GREEDY)) == wanted
        shapes = engine.stats.cuda_graphs
        assert shapes is not None
        assert shapes["replayed"] > 0
        assert (shapes["refused"], shapes["why"]) == (0, None)
