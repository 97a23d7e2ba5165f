"""Short forwards are captured once for a slot, compared before use, and replayed on all ranks or on
none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from decoding import GREEDY, Engine, Settings
from offload.cache.streaming import StreamingCache
from parallel.config.parameter_count import MAX_GRAPH_TOKENS
from parallel.execution import cuda_graphs
from parallel.execution.cuda_graphs import GraphRunner, cuda_graphs_supported
from parallel.model.loading import load_model
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.captures import (
    LogitsFn,
    ScriptedCapturer,
    exact_graph,
    failed_capture,
    fixed_slot_graph,
    inaccurate_graph,
    nan_graph,
    stale_graph,
    streaming_cache,
    unpadded_graph,
)
from support.driving import tiered_cache
from support.engines import DEMO, Pair
from support.links import make_test_link
from support.models import random_tokens
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except


@pytest.fixture(scope="module")
def draft() -> Transformer:
    return load_model(DEMO / "draft", TensorParallelGroup(), "float32")


SIZES = [1, 2]


def captured_runner(
    script: Callable[[LogitsFn], LogitsFn], model: Transformer, sizes: Sequence[int] = SIZES
) -> tuple[GraphRunner, StreamingCache]:
    """Return a runner, and a cache on which forwards of these sizes are captured by a script."""
    runner, cache = GraphRunner(True, ScriptedCapturer(script)), streaming_cache(model)
    runner.capture(model, cache, sizes)
    return runner, cache


def check_logits(
    runner: GraphRunner, model: Transformer, cache: StreamingCache, forwards: int, longest: int = 2
) -> None:
    """Assert that forwards of 1 to `longest` tokens in turn give the logits of an eager model."""
    plain = streaming_cache(model)
    for seed in range(forwards):
        tokens = random_tokens(1 + seed % longest, seed=seed)
        rows = min(2, len(tokens))
        logits, expected = runner(model, tokens, cache, rows), model(tokens, plain, rows)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        cache.advance(len(tokens))
        plain.advance(len(tokens))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (exact_graph, None),
        (inaccurate_graph, "replayed logits off by 0.02, written KV off by 0"),
        (stale_graph, "off by "),
        (fixed_slot_graph, "off by "),
        (failed_capture, "RuntimeError('operation not permitted when stream is capturing')"),
        (nan_graph, "off by nan"),
    ],
)
def test_a_graph_is_compared_before_it_is_replayed(
    script: Any, why: str | None, draft: Transformer
) -> None:
    """In another place than that of its capture, where a position that is baked in shows."""
    runner, cache = captured_runner(script, draft)
    counts = dict(runner.counts)
    assert (counts["replayed"], counts["refused"]) == ((2, 0) if why is None else (0, 2))
    assert counts["seconds"] > 0
    assert (counts["why"] is None) if why is None else (why in counts["why"])
    check_logits(runner, draft, cache, 24)
    assert runner.counts == counts  # nothing is captured while a sequence is decoded


def test_a_replay_replaces_the_launches(
    draft: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, launched = [], []

    def counting(function: LogitsFn) -> LogitsFn:
        return lambda: replayed.append(1) or function()

    forward = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward", lambda *arguments: launched.append(1) or forward(*arguments)
    )
    runner, cache = captured_runner(counting, draft, [1])
    # before the capture, in the replay that is compared, and the launches it is compared with
    assert (len(replayed), len(launched)) == (1, 3)
    for seed in range(10):
        runner(draft, random_tokens(1, seed=seed), cache, 1)
        cache.advance(1)
    assert (len(replayed), len(launched)) == (11, 13)  # none outside of replays


def test_a_forward_that_cannot_be_prepared_runs_eagerly(
    draft: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of memory, for example: other ranks would wait for its collectives."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(cuda_graphs, "StaticForward", fail)
    runner, cache = captured_runner(exact_graph, draft, [2])
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 1)
    assert "no memory left" in runner.counts["why"]
    check_logits(runner, draft, cache, 3)


def test_a_forward_is_padded_to_the_next_captured_size(draft: Transformer) -> None:
    """Also if the window slides, as often as without padding, and if tokens are rolled back."""
    replayed: list[int] = []

    def counting(function: LogitsFn) -> LogitsFn:
        tokens = function.args[1]  # type: ignore[attr-defined]
        return lambda: replayed.append(len(tokens)) or function()

    runner, cache = captured_runner(counting, draft, [1, 4])
    plain = streaming_cache(draft)
    replayed.clear()
    for seed in range(60):
        tokens = random_tokens(1 + seed % 5, seed=seed)
        logits, expected = runner(draft, tokens, cache, 1), draft(tokens, plain, 1)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for each in (cache, plain):
            each.advance(len(tokens))
            each.crop(each.length - seed % 2)
        assert cache._dropped == plain._dropped
    assert cache._dropped > 0
    assert replayed == [1, 4, 4, 4] * 12  # five tokens are launched


def test_a_graph_without_padding_is_refused(draft: Transformer) -> None:
    """It would write to slots that are visible to the next forward."""
    runner, _ = captured_runner(unpadded_graph, draft, [4])
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 1)


def test_nothing_is_captured_without_a_second_place(draft: Transformer) -> None:
    """There a graph is compared."""
    runner, cache = GraphRunner(True, ScriptedCapturer(exact_graph)), streaming_cache(draft)
    cache.slots = 9
    runner.capture(draft, cache, [8, 9])
    assert runner.counts["replayed"] == 1


def test_a_slots_next_sequence_replays_its_graphs(draft: Transformer) -> None:
    runner, cache = captured_runner(exact_graph, draft)
    capturer = runner.capturer
    assert isinstance(capturer, ScriptedCapturer)
    check_logits(runner, draft, cache, 8)
    cache.reset()
    runner.capture(draft, cache, SIZES)
    assert capturer.captures == 2
    check_logits(runner, draft, cache, 8)
    other = streaming_cache(draft)
    runner.capture(draft, other, SIZES)  # in place of the first
    assert (capturer.captures, capturer.count) == (4, 2)
    check_logits(runner, draft, other, 8)
    assert runner.counts["replayed"] == 4


def test_a_sequence_that_was_not_finite_leaves_nothing_to_the_next(draft: Transformer) -> None:
    """A replay reads all slots, those that are masked too."""
    runner, cache = captured_runner(exact_graph, draft)
    with torch.inference_mode():
        for buffer in cache.buffers(0)[:2]:
            buffer.fill_(torch.nan)
    cache.reset()
    check_logits(runner, draft, cache, 8)


def test_only_short_forwards_are_captured(draft: Transformer) -> None:
    runner, _ = captured_runner(exact_graph, draft, [MAX_GRAPH_TOKENS, MAX_GRAPH_TOKENS + 1])
    assert runner.counts["replayed"] == 1


def test_nothing_is_captured_unless_enabled(draft: Transformer) -> None:
    capturer = ScriptedCapturer(exact_graph)
    runner, cache = GraphRunner(False, capturer), streaming_cache(draft)
    runner.capture(draft, cache, SIZES)
    check_logits(runner, draft, cache, 4)
    assert (capturer.captures, runner.report) == (0, None)


def test_a_broken_capturer_is_not_called(draft: Transformer) -> None:
    capturer = ScriptedCapturer(exact_graph)
    capturer.broken = "a capture before this one"
    runner, cache = GraphRunner(True, capturer), streaming_cache(draft)
    runner.capture(draft, cache, SIZES)
    check_logits(runner, draft, cache, 8)
    assert capturer.captures == 0
    assert runner.counts["why"] == "a capture before this one"


def test_logits_outlive_the_next_forward(draft: Transformer) -> None:
    out = torch.zeros(1, draft.config.vocab)

    def in_place(function: LogitsFn) -> LogitsFn:  # like a CUDA graph
        return lambda: out.copy_(function())

    runner, cache = captured_runner(in_place, draft, [1])
    outs = []
    for seed in range(4):
        outs.append(runner(draft, random_tokens(1, seed=seed), cache, 1))
        cache.advance(1)
    assert runner.counts["replayed"] == 1
    saved = [logits.clone() for logits in outs]
    runner(draft, random_tokens(1, seed=99), cache, 1)
    assert all(torch.equal(*pair) for pair in zip(outs, saved, strict=True))
    assert not torch.equal(outs[-1], outs[-2])


def test_long_forwards_and_other_caches_run_eagerly(draft: Transformer) -> None:
    runner, cache = captured_runner(stale_graph, draft, [])
    runner._forwards[draft].captured[(0,), 2] = None  # refused
    other = tiered_cache(make_test_link("view"), 2)
    check_logits(runner, draft, cache, 8, longest=4)
    logits = torch.zeros(1, 5)
    assert torch.equal(runner(lambda *_: logits, random_tokens(1), other, 1), logits)  # type: ignore[arg-type]


def test_graphs_are_captured_until_their_memory_is_used_up(draft: Transformer) -> None:
    capturer = ScriptedCapturer(exact_graph)
    capturer.graph_bytes = 10_000_000
    runner, cache = GraphRunner(True, capturer, max_bytes=15e6), streaming_cache(draft)
    runner.capture(draft, cache, [1, 2, 4])
    assert (capturer.count, runner.nbytes) == (2, 20_000_000)  # the second one exceeds it
    why = "others have 20 MB of device memory, as much as graphs may have"
    assert (runner.counts["refused"], runner.counts["why"]) == (0, why)
    check_logits(runner, draft, cache, 12, longest=4)
    runner.release(cache)
    assert runner.counts["bytes"] == runner.nbytes == 0
    runner.capture(draft, streaming_cache(draft), [4])
    assert (capturer.count, runner.counts["replayed"]) == (1, 3)


def test_a_released_cache_is_freed_without_garbage_collection(draft: Transformer) -> None:
    """Memory for the next request is planned right away, before a collection of cycles."""
    gc.collect()
    gc.disable()
    try:
        runner, cache = captured_runner(exact_graph, draft)
        check_logits(runner, draft, cache, 4)
        assert runner.counts["replayed"] == 2
        released = weakref.ref(cache)
        runner.release(cache)
        assert runner.capturer.count == 0
        del cache
        assert released() is None
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
def test_graphs_do_not_change_proposals_of_any_level(mode: str, budget: int, demo: Pair) -> None:
    """Greedy output is the target's whatever is drafted; acceptance would change.

    The second request replays the graphs of the first one's slot.
    """
    choices: dict[str, Any] = {
        "retrieval_budget": budget,
        "link": "emulated:4",
        "gpu_kv_layers": 1,
        "device_memory": 1 << 30,
    }
    choices |= {"num_draft_tokens": 7, "num_inner_draft_tokens": 3, "prompt_lookup_ngram": 0}
    runs = []
    for graphs in (True, False):
        captures = []
        with demo.engine(mode, graphs=graphs, **choices) as engine:
            for tokens in (prompt("typing"), prompt("typing")[150:]):
                output = list(engine.generate(tokens, 20, GREEDY))
                captures.append(engine.stats.as_dict()["cuda_graphs"])
                levels = [level.stats for level in engine.stats.levels]
                runs.append((output, [(stats.proposed, stats.accepted) for stats in levels]))
        first, second = captures
        if graphs:
            assert first["replayed"] > 0
            assert (first["refused"], first["why"]) == (0, None)
            assert second["replayed"] == first["replayed"]
        else:
            assert first is second is None
    assert runs[:2] == runs[2:]


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
    settings = Settings(dtype="float32", retrieval_budget=300, graphs=True, shard_draft=shard)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.scheduler.stop_tokens = frozenset()
    if group.rank:
        engine.run_worker()
        return [], cuda_graphs_supported(group), None
    output = list(engine.generate(tokens, FEW, GREEDY))
    engine.close()
    return output, cuda_graphs_supported(group), engine.stats.cuda_graphs


@pytest.mark.slow
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
    runner, cache = GraphRunner(True, capturer), streaming_cache(model)
    runner.capture(model, cache, SIZES)
    check_logits(runner, model, cache, 8)
    return runner.counts


def run_with_broken_capturer(
    group: TensorParallelGroup, broken_rank: int
) -> tuple[int, dict[str, Any]]:
    capturer = ScriptedCapturer(exact_graph)
    capturer.broken = "a capture before this one" if group.rank == broken_rank else None
    model = load_model(DEMO / "draft", group, "float32")
    runner, cache = GraphRunner(True, capturer), streaming_cache(model)
    runner.capture(model, cache, SIZES)
    check_logits(runner, model, cache, 6)
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
