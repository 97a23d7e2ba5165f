"""Forwards are captured once they are frequent, compared before use, and replayed on all ranks or
on none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import parallel.execution.cuda_graphs
from decoding import GREEDY, Engine, Settings
from parallel.config.parameter_count import MAX_GRAPH_TOKENS
from parallel.execution.cuda_graphs import GraphRunner, cuda_graphs_supported
from parallel.model.loading import load_model
from parallel.model.transformer import Transformer
from parallel.ranks.graph_capture import GraphCapturer
from parallel.ranks.process_group import TensorParallelGroup
from support.captures import (
    USES,
    LogitsFn,
    ScriptedCapturer,
    exact_graph,
    failed_capture,
    fixed_slot_graph,
    inaccurate_graph,
    nan_graph,
    stale_graph,
    streaming_cache,
)
from support.driving import tiered_cache
from support.engines import DEMO, Pair
from support.links import CPU, make_test_link
from support.models import random_tokens
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except


@pytest.fixture(scope="module")
def draft() -> Transformer:
    return load_model(DEMO / "draft", TensorParallelGroup(), "float32")


def check_logits(runner: GraphRunner, model: Transformer, forwards: int) -> None:
    """Assert that forwards of one and two tokens in turn give the logits of an eager model."""
    cache, plain = streaming_cache(model), streaming_cache(model)
    for seed in range(forwards):
        tokens = random_tokens(1 + seed % 2, seed=seed)
        logits, expected = runner(model, tokens, cache, 1), model(tokens, plain, 1)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        cache.advance(len(tokens))
        plain.advance(len(tokens))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (exact_graph, None),
        (inaccurate_graph, "replayed logits are off by 0.02, written KV by 0"),
        (stale_graph, "off by "),
        (failed_capture, "RuntimeError('operation not permitted when stream is capturing')"),
        (nan_graph, "off by nan"),
    ],
)
def test_a_graph_is_compared_before_it_is_replayed(
    script: Any, why: str | None, draft: Transformer
) -> None:
    runner = GraphRunner(True, ScriptedCapturer(script), USES)
    check_logits(runner, draft, 24)
    counts = runner.counts
    assert (counts["replayed"], counts["refused"]) == ((2, 0) if why is None else (0, 2))
    assert counts["seconds"] > 0
    assert (counts["why"] is None) if why is None else (why in counts["why"])


def test_a_replay_replaces_the_launches(
    draft: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, launched = [], []

    def counting(function: LogitsFn) -> LogitsFn:
        return lambda: replayed.append(1) or function()

    runner, cache = GraphRunner(True, ScriptedCapturer(counting), USES), streaming_cache(draft)
    forward = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward", lambda *arguments: launched.append(1) or forward(*arguments)
    )
    for seed in range(10):
        runner(draft, random_tokens(1, seed=seed), cache, 1)
        cache.advance(1)
    replays = 10 - USES
    assert len(replayed) == 1 + replays  # one of them to compare the graph
    # eager; before the capture, to compare, and for the logits; within replays
    assert len(launched) == (USES - 1) + 3 + len(replayed)


def test_a_graph_is_compared_at_another_length(draft: Transformer) -> None:
    """At the length of its capture a position that is baked in would not show."""
    runner = GraphRunner(True, ScriptedCapturer(fixed_slot_graph), USES)
    cache = streaming_cache(draft)
    for seed in range(USES):
        assert runner.counts["refused"] == 0
        runner(draft, random_tokens(1, seed=seed), cache, 1)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 1)


def test_a_comparison_leaves_the_sequence_as_it_was(draft: Transformer) -> None:
    """With two query tokens it writes to a slot that the forward itself writes, too."""
    runner, cache = GraphRunner(True, ScriptedCapturer(exact_graph), 1), streaming_cache(draft)
    plain, tokens = streaming_cache(draft), random_tokens(2, seed=3)
    for _ in range(2):
        logits, expected = runner(draft, tokens, cache, 2), draft(tokens, plain, 2)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for mine, other in zip(cache.buffers(0), plain.buffers(0), strict=True):
            written = slice(0, cache.length + 2)
            torch.testing.assert_close(mine[..., written, :], other[..., written, :])
        cache.advance(2)
        plain.advance(2)
    assert runner.counts["replayed"] == 1


def test_nothing_is_captured_in_the_last_slot(draft: Transformer) -> None:
    """A comparison would have no slot."""
    capturer = ScriptedCapturer(exact_graph)
    runner, cache = GraphRunner(True, capturer, 1), streaming_cache(draft)
    cache.has_room = lambda rows: rows < 2  # type: ignore[method-assign]
    runner(draft, random_tokens(1), cache, 1)
    assert capturer.captures == 0


def test_warm_up_runs_until_replays(draft: Transformer) -> None:
    runner, cache = GraphRunner(True, GraphCapturer(CPU)), streaming_cache(draft)
    runner.warm_up(draft, random_tokens(2), cache, 1)
    assert runner.counts["replayed"] == 1
    assert cache.length == 0


def test_a_broken_capturer_is_not_called(draft: Transformer) -> None:
    capturer = ScriptedCapturer(exact_graph)
    capturer.broken = "a capture before this one"
    runner = GraphRunner(True, capturer, USES)
    check_logits(runner, draft, 20)
    assert capturer.captures == 0
    assert runner.counts["why"] == "a capture before this one"


def test_logits_outlive_the_next_forward(draft: Transformer) -> None:
    out = torch.zeros(1, draft.config.vocab)

    def in_place(function: LogitsFn) -> LogitsFn:  # like a CUDA graph
        return lambda: out.copy_(function())

    runner, cache = GraphRunner(True, ScriptedCapturer(in_place), USES), streaming_cache(draft)
    outs = []
    for seed in range(USES + 4):
        outs.append(runner(draft, random_tokens(1, seed=seed), cache, 1))
        cache.advance(1)
    assert runner.counts["replayed"] == 1
    saved = [logits.clone() for logits in outs]
    runner(draft, random_tokens(1, seed=99), cache, 1)
    assert all(torch.equal(*pair) for pair in zip(outs, saved, strict=True))
    assert not torch.equal(outs[-1], outs[-2])


def test_long_forwards_and_other_caches_run_eagerly(draft: Transformer) -> None:
    capturer = ScriptedCapturer(failed_capture)
    runner, cache = GraphRunner(True, capturer, 1), streaming_cache(draft)
    other = tiered_cache(make_test_link("view"), 2)
    for _ in range(3):
        runner(draft, random_tokens(MAX_GRAPH_TOKENS + 1), cache, 1)
    assert capturer.captures == 0
    logits = torch.zeros(1, 5)
    assert torch.equal(runner(lambda *_: logits, random_tokens(1), other, 1), logits)  # type: ignore[arg-type]


def test_an_evicted_cache_is_freed_without_garbage_collection(draft: Transformer) -> None:
    """Memory for the next request is planned right away, before a collection of cycles."""
    gc.collect()
    gc.disable()
    try:
        runner, cache = GraphRunner(True, GraphCapturer(CPU), USES), streaming_cache(draft)
        for seed in range(USES + 3):
            runner(draft, random_tokens(1, seed=seed), cache, 1)
            cache.advance(1)
        runner(draft, random_tokens(2), cache, 1)  # a key without a graph
        assert runner.counts["replayed"] == 1
        evicted = weakref.ref(cache)
        runner.evict()
        del cache
        assert evicted() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize(
    ("mode", "budget"),
    slow_except(
        [
            ("speculative", 300),  # its budget is unused
            *product(("retrieval", "hierarchical"), (300, 4096)),
        ],
        3,
    ),
)
def test_graphs_do_not_change_proposals_of_any_level(
    mode: str, budget: int, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy output is the target's whatever is drafted; acceptance would change."""
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
    choices: dict[str, Any] = {
        "retrieval_budget": budget,
        "link": "emulated:4",
        "gpu_kv_layers": 1,
        "device_memory": 1 << 30,
    }
    choices |= {"num_draft_tokens": 7, "num_inner_draft_tokens": 3, "prompt_lookup_ngram": 0}
    runs = []
    for graphs in (True, False):
        with demo.engine(mode, graphs=graphs, **choices) as engine:
            tokens = list(engine.generate(prompt("typing"), 20, GREEDY))
            counts = engine.stats.as_dict()["cuda_graphs"]
            if graphs:
                assert counts["replayed"] > 0
                assert (counts["refused"], counts["why"]) == (0, None)
            else:
                assert counts is None
            levels = [level.stats for level in engine.stats.levels]
            runs.append((tokens, [(stats.proposed, stats.accepted) for stats in levels]))
    assert runs[0] == runs[1]


# two ranks take turns on the cores: a shorter prompt, and fewer new tokens
SHORT, FEW = 600, 24


@pytest.fixture(scope="module")
def reports() -> list[dict[Any, Any]]:
    """Return the results of two ranks, which start once for all tests."""
    return run_ranks(2, run_rank, prompt("typing")[:SHORT])


def run_rank(tokens: list[int]) -> dict[Any, Any]:
    group = TensorParallelGroup.from_environment("cpu")
    return {
        **{("broken", rank): run_with_broken_capturer(group, rank) for rank in (0, 1)},
        **{case: run_with_failing_capture(group, *case) for case in FAILURES},
        **{("generate", shard): generate(group, tokens, shard) for shard in (False, True)},
    }


def generate(
    group: TensorParallelGroup, tokens: list[int], shard: bool
) -> tuple[list[int], bool, dict[str, Any] | None]:
    parallel.execution.cuda_graphs.USES = 2
    settings = Settings(dtype="float32", retrieval_budget=300, graphs=True, shard_draft=shard)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.scheduler.stop_tokens = frozenset()
    if group.rank:
        engine.run_worker()
        return [], cuda_graphs_supported(group), None
    output = list(engine.generate(tokens, FEW, GREEDY))
    engine.close()
    return output, cuda_graphs_supported(group), engine.stats.cuda_graphs


@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks_replay_what_one_rank_generates(
    shard: bool, demo: Pair, reports: list[dict[Any, Any]]
) -> None:
    rank_0, rank_1 = (report["generate", shard] for report in reports)
    output, supported, counts = rank_0
    assert output == demo.generate("plain", prompt("typing")[:SHORT], FEW)
    assert rank_1[0] == []
    assert counts is not None
    assert counts["replayed"] > 0
    assert counts["refused"] == 0
    assert supported is rank_1[1] is False  # a CPU has no CUDA graphs


FAILURES = [(0, failed_capture), (1, failed_capture), (1, nan_graph)]


def run_with_failing_capture(
    group: TensorParallelGroup, failing_rank: int, script: Callable[[LogitsFn], LogitsFn]
) -> dict[str, Any]:
    model = load_model(DEMO / "draft", group, "float32")
    capturer = ScriptedCapturer(script if group.rank == failing_rank else exact_graph)
    runner = GraphRunner(True, capturer, USES)
    check_logits(runner, model, 20)
    return runner.counts


def run_with_broken_capturer(
    group: TensorParallelGroup, broken_rank: int
) -> tuple[int, dict[str, Any]]:
    capturer = ScriptedCapturer(exact_graph)
    capturer.broken = "a capture before this one" if group.rank == broken_rank else None
    runner = GraphRunner(True, capturer, USES)
    check_logits(runner, load_model(DEMO / "draft", group, "float32"), 14)
    return capturer.captures, runner.counts


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_no_rank_captures_if_one_capturer_is_broken(
    broken_rank: int, reports: list[dict[Any, Any]]
) -> None:
    for made, counts in (report["broken", broken_rank] for report in reports):
        assert made == 0
        assert (counts["refused"], counts["why"]) == (2, "a capture before this one")


@pytest.mark.parametrize("case", FAILURES)
def test_no_rank_replays_if_one_capture_fails(
    case: tuple[int, Callable[[LogitsFn], LogitsFn]], reports: list[dict[Any, Any]]
) -> None:
    """Ranks that replay and ranks that do not would mix up their all-reduces."""
    for counts in (report[case] for report in reports):
        assert (counts["replayed"], counts["refused"]) == (0, 2)
        assert counts["why"]


def test_graphs_are_off_by_default_on_a_cpu() -> None:
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", Settings(retrieval_budget=300))
    assert engine.runtime.settings.graphs is False
    engine.close()
