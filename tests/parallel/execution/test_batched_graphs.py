"""Batched forwards are captured on the caches of the first slots, and replayed for any of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import GREEDY
from offload.cache import static_forward
from offload.cache.streaming import StreamingCache
from parallel.config.parameter_count import MAX_STATIC_TOKENS
from parallel.execution.batched_forward import ForwardRequest, run_forward
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.loading import load_model
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import SMALL, requests, run_alone, run_batch, tokens
from support.captures import (
    LogitsFn,
    ScriptedCapturer,
    count_replays,
    exact_graph,
    failed_capture,
    fixed_slot_graph,
    streaming_cache,
)
from support.engines import DEMO, Pair
from support.interpreter import import_interpreted
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

CONCURRENCY = 3


@pytest.fixture(scope="module", params=["demo", "recurrent"])
def draft(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Transformer:
    folder = DEMO / "draft"
    if request.param == "recurrent":
        folder = checkpoint(family="qwen3_5_text", vocab_size=512)
    return load_model(folder, TensorParallelGroup(), "float32")


def caches_at(model: Transformer, lengths: Sequence[int]) -> list[StreamingCache]:
    """Return caches that hold so many tokens, each of its own sequence."""
    caches = [streaming_cache(model) for _ in lengths]
    for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        prefill(model, cache, length, seed)
    return caches


def prefill(model: Transformer, cache: StreamingCache, length: int, seed: int) -> None:
    for part in random_tokens(length, seed=seed).split(cache.shape.slack):
        model(part, cache, 1)
        cache.advance(len(part))


def forward_requests(
    model: Transformer,
    caches: Sequence[StreamingCache],
    counts: Sequence[int],
    seed: int,
    rows: int = 1,
) -> list[ForwardRequest]:
    return [
        ForwardRequest(model, cache, random_tokens(count, seed=100 * seed + index), rows)
        for index, (cache, count) in enumerate(zip(caches, counts, strict=True))
    ]


def captured_caches(
    runner: GraphRunner, model: Transformer, lengths: Sequence[int], sizes: Sequence[int]
) -> list[StreamingCache]:
    """Return caches that hold so many tokens, each in its own slot, where forwards are captured."""
    caches = list[StreamingCache]()
    for slot, length in enumerate(lengths):
        cache = streaming_cache(model)
        runner.capture(model, cache, sizes, slot)
        prefill(model, cache, length, slot)
        caches.append(cache)
    return caches


@pytest.mark.parametrize(
    ("lengths", "rows", "is_fused"),
    slow_except(
        [
            ((5, 31, 120), 1, False),
            ((120, 31, 5), 1, False),
            ((5, 31, 120), 2, False),
            ((120, 31, 5), 2, False),
            ((5, 31, 120), 2, True),
        ],
        *range(4),
    ),
)
def test_sequences_of_any_lengths_share_replays(
    lengths: tuple[int, ...],
    rows: int,
    is_fused: bool,
    draft: Transformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them or some, also if a window slides, if tokens are rolled back, and if sequences
    have different numbers of query tokens. Those that take no part stay as they are.
    """
    if is_fused:
        pytest.importorskip("triton")
        kernels = import_interpreted("offload.kernels.slot_attention")
        monkeypatch.setattr(static_forward, "slot_kernels", lambda *_: (kernels, ""))
    capturer = ScriptedCapturer(exact_graph)
    runner = GraphRunner(True, capturer)
    caches, plain = captured_caches(runner, draft, lengths, [2, 3]), caches_at(draft, lengths)
    assert runner.counts["replayed"] == capturer.captures == 2 * 5  # slots 0, 1, 2, 0-1 and 0-2
    replays = count_replays(monkeypatch)
    for seed in range(16):
        counts = (2, 2, 3) if seed % 2 else (2, 2, 2)
        taken = [[0, 1, 2], [0, 2], [2], [1, 2]][seed % 4]
        some, others = [caches[slot] for slot in taken], [plain[slot] for slot in taken]
        few = [counts[slot] for slot in taken]
        results = runner.run(forward_requests(draft, some, few, seed, rows))
        expected = run_forward(forward_requests(draft, others, few, seed, rows))
        for logits, reference in zip(results, expected, strict=True):
            assert len(logits) == rows
            torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
        for cache, count in zip((*some, *others), few * 2, strict=True):
            cache.advance(count)
            cache.crop(cache.length - seed % 2)
    assert [size for size, _ in replays] == [3, 2, 1, 2] * 4
    assert capturer.captures == 10
    assert max(cache._dropped for cache in caches) > 0


def test_a_shared_graph_is_compared_in_another_place(draft: Transformer) -> None:
    runner = GraphRunner(True, ScriptedCapturer(exact_graph))
    captured_caches(runner, draft, [5], [1])
    runner.capturer.script = fixed_slot_graph  # type: ignore[attr-defined]
    runner.capture(draft, streaming_cache(draft), [1], 1)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (1, 2)
    assert "off by" in runner.counts["why"]


def test_a_sequence_that_is_not_finite_does_not_keep_others_from_capturing(
    draft: Transformer,
) -> None:
    runner = GraphRunner(True, ScriptedCapturer(exact_graph))
    (cache,) = captured_caches(runner, draft, [31], [2])
    with torch.inference_mode():
        cache.buffers(1)[0].fill_(torch.nan)
    runner.capture(draft, streaming_cache(draft), [2], 1)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (3, 0)


def test_capturing_leaves_the_sequences_in_other_slots_as_they_are(draft: Transformer) -> None:
    runner, plain = GraphRunner(True, ScriptedCapturer(exact_graph)), streaming_cache(draft)
    (cache,) = captured_caches(runner, draft, [31], [2])
    prefill(draft, plain, 31, 0)
    attended = cache.traffic.attended
    runner.capture(draft, streaming_cache(draft), [2], 1)
    assert (cache.length, cache.traffic.attended) == (31, attended)
    for mine, other in zip(cache.buffers(1)[:2], plain.buffers(1)[:2], strict=True):
        torch.testing.assert_close(mine[..., :31, :], other[..., :31, :])
    tokens = random_tokens(2)
    torch.testing.assert_close(draft(tokens, cache, 1), draft(tokens, plain, 1))


def test_a_new_cache_frees_the_graphs_that_its_slot_shared(draft: Transformer) -> None:
    gc.collect()
    gc.disable()
    try:
        capturer = ScriptedCapturer(exact_graph)
        runner = GraphRunner(True, capturer)
        caches = captured_caches(runner, draft, (5, 31, 40), [1])
        assert capturer.count == 5
        replaced = weakref.ref(caches.pop())
        runner.capture(draft, streaming_cache(draft), [1], 2)
        assert replaced() is None
        assert (capturer.count, capturer.captures) == (5, 7)
        runner.release(caches[0])
        assert capturer.count == 2  # the other slots' own
    finally:
        gc.enable()


def test_graphs_that_slots_share_have_half_of_the_memory(draft: Transformer) -> None:
    capturer = ScriptedCapturer(exact_graph)
    capturer.graph_bytes = 10
    runner = GraphRunner(True, capturer, max_bytes=60)
    caches = captured_caches(runner, draft, (5, 31, 9), [1, 2])
    assert capturer.count == 6  # each slot's own
    assert runner.counts["bytes"] == 60
    for cache in caches[1:]:
        runner.release(cache)
    runner.capture(draft, caches[1], [1], 1)
    assert capturer.count == 3
    runner.release(caches[0])
    runner.capture(draft, caches[0], [1], 0)
    runner.capture(draft, caches[1], [1], 1)  # there is room for a shared one now
    assert capturer.count == 3
    assert (runner.counts["replayed"], runner.counts["refused"]) == (9, 0)


def test_a_batched_forward_of_many_tokens_runs_eagerly(draft: Transformer) -> None:
    capturer = ScriptedCapturer(exact_graph)
    runner = GraphRunner(True, capturer)
    longest = MAX_STATIC_TOKENS // 5
    captured_caches(runner, draft, [5] * 5, [longest, longest + 1])
    assert capturer.captures == 2 * 5 + 2 * 4 - 1  # not five of the longest


SIZES = [(60, 12), (33, 20), (90, 16), (41, 12)]  # one starts later, and one ends alone


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize(
    ("mode", "resident"),
    slow_except([("retrieval", 1), ("speculative", None), ("hierarchical", 1)], 0, 2),
)
def test_concurrent_requests_match_sequential_ones(
    mode: str, resident: int | None, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays, batch = count_replays(monkeypatch), requests(GREEDY, SIZES)
    with demo.engine(mode, graphs=False, gpu_kv_layers=resident, **SMALL) as engine:
        expected = run_alone(engine, batch)
    with demo.engine(mode, graphs=True, gpu_kv_layers=resident, **SMALL) as engine:
        completions = run_batch(engine, batch, CONCURRENCY)
    assert tokens(completions) == expected
    counts = [completion.stats.cuda_graphs for completion in completions]
    assert all(graphs is not None and graphs["refused"] == 0 for graphs in counts)
    assert (CONCURRENCY, 1) in replays


# tokens, counts of graphs, and replays of each script
Results = list[tuple[list[list[int]], dict[str, Any], list[tuple[int, int]]]]


def run_rank() -> Results:
    """Run concurrent requests on two ranks; the second captures by a script of `SCRIPTS`.

    It has device memory for one of its graphs, if they are `LARGE`.
    """
    group, results = TensorParallelGroup.from_environment("cpu"), Results()
    pair = Pair(DEMO / "target", DEMO / "draft", group)
    for script in SCRIPTS:
        capturer = ScriptedCapturer(script if group.rank else exact_graph)
        capturer.graph_bytes = LARGE * (script is large_graph and group.rank)
        group.graph_capturer = capturer
        with pytest.MonkeyPatch.context() as patch:
            replays = count_replays(patch)
            with pair.engine("hierarchical", graphs=True, **SMALL) as engine:
                if group.rank:
                    engine.run_worker()
                    results.append(([], {}, replays))
                    continue
                batch = requests(GREEDY, SIZES[:CONCURRENCY])
                completions = run_batch(engine, batch, CONCURRENCY)
                engine.close()
        graphs = completions[0].stats.cuda_graphs
        assert graphs is not None
        results.append((tokens(completions), graphs, replays))
    return results


LARGE = 1 << 60


def large_graph(function: LogitsFn) -> LogitsFn:
    return exact_graph(function)


SCRIPTS = [exact_graph, failed_capture, large_graph]


@pytest.mark.slow
def test_two_ranks_replay_the_same_batched_forwards(demo: Pair) -> None:
    with demo.engine("plain") as engine:
        expected = run_alone(engine, requests(GREEDY, SIZES[:CONCURRENCY]))
    rank_0, rank_1 = run_ranks(2, run_rank)
    for script, (sequences, counts, replays), (_, _, others) in zip(
        SCRIPTS, rank_0, rank_1, strict=True
    ):
        assert sequences == expected
        # replays on one rank are the draft's, on rank 0
        assert [replay for replay in replays if replay[1] == 2] == others
        assert ((CONCURRENCY, 2) in others) == (counts["why"] is None) == (script is exact_graph)
