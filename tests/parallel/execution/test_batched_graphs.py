"""Batched forwards are captured like those of one sequence: each combination of sequences and
numbers of query tokens once it is frequent, until one of these sequences ends.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import parallel.execution.cuda_graphs
from decoding import GREEDY
from offload.cache.streaming import StreamingCache
from parallel.config.parameter_count import MAX_STATIC_TOKENS
from parallel.execution.batched_forward import ForwardRequest, run_forward
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.loading import load_model
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.batches import SMALL, requests, run_alone, run_batch, tokens
from support.captures import (
    USES,
    ScriptedCapturer,
    count_replays,
    exact_graph,
    failed_capture,
    fixed_slot_graph,
    streaming_cache,
)
from support.engines import DEMO, Pair
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

CONCURRENCY = 3


@pytest.fixture(scope="module")
def draft() -> Transformer:
    return load_model(DEMO / "draft", TensorParallelGroup(), "float32")


def caches_at(model: Transformer, lengths: Sequence[int]) -> list[StreamingCache]:
    """Return caches that hold so many tokens, each of its own sequence."""
    caches = [streaming_cache(model) for _ in lengths]
    for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        model(random_tokens(length, seed=seed), cache, 1)
        cache.advance(length)
    return caches


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


def advance(forwards: Sequence[ForwardRequest]) -> None:
    for request in forwards:
        request.cache.advance(len(request.tokens))


@pytest.mark.parametrize("lengths", [(5, 31, 120), (120, 31, 5)])
@pytest.mark.parametrize("rows", [1, 2])
def test_sequences_of_any_lengths_share_replays(
    lengths: tuple[int, ...], rows: int, draft: Transformer
) -> None:
    """Also if a window slides, even if only for the padding, if tokens are rolled back, and if
    sequences have different numbers of query tokens.
    """
    capturer = ScriptedCapturer(exact_graph)
    runner = GraphRunner(True, capturer, USES)
    caches, plain = caches_at(draft, lengths), caches_at(draft, lengths)
    for seed in range(16):
        counts = (2, 2, 3) if seed % 2 else (2, 2, 2)
        for cache in plain:
            cache.begin_forward(max(counts))
        results = runner.run(forward_requests(draft, caches, counts, seed, rows))
        expected = run_forward(forward_requests(draft, plain, counts, seed, rows))
        for logits, reference in zip(results, expected, strict=True):
            assert len(logits) == rows
            torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
        for cache, count in zip((*caches, *plain), counts * 2, strict=True):
            cache.advance(count)
            cache.crop(cache.length - seed % 2)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (2, 0)
    assert capturer.captures == 2
    assert max(cache._dropped for cache in caches) > 0


def test_a_shared_graph_is_compared_at_other_lengths_of_all(draft: Transformer) -> None:
    runner = GraphRunner(True, ScriptedCapturer(fixed_slot_graph), USES)
    caches = caches_at(draft, (5, 31, 40))
    for seed in range(USES):
        assert runner.counts["refused"] == 0
        runner.run(forward_requests(draft, caches, (1, 1, 1), seed))
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 1)
    assert "off by" in runner.counts["why"]


def test_evicting_a_sequence_frees_its_shared_graphs(draft: Transformer) -> None:
    gc.collect()
    gc.disable()
    try:
        capturer = ScriptedCapturer(exact_graph)
        runner, caches = GraphRunner(True, capturer, USES), caches_at(draft, (5, 31, 40))
        for seed in range(USES + 2):
            for subset in (caches, caches[:2]):
                forwards = forward_requests(draft, subset, [1] * len(subset), seed)
                runner.run(forwards)
                advance(forwards)
        assert capturer.count == runner.counts["replayed"] == 2
        evicted = weakref.ref(caches[2])
        runner.evict([caches.pop()])
        del forwards, subset
        assert evicted() is None
        assert capturer.count == 1
        seconds = runner.counts["seconds"]
        runner.run(forward_requests(draft, caches, (1, 1), 99))
        assert runner.counts["seconds"] == seconds  # nothing is captured: it was replayed
        runner.evict(caches[1:])
        assert capturer.count == 0
    finally:
        gc.enable()


def test_only_graphs_of_batched_forwards_are_limited(
    draft: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.execution.cuda_graphs, "MAX_GRAPHS", 2)
    capturer = ScriptedCapturer(exact_graph)
    runner, caches = GraphRunner(True, capturer, 1), caches_at(draft, (5, 31))

    def graphs_after(count: int, subset: list[StreamingCache]) -> int:
        """Run such forwards; return the number of captured graphs."""
        for seed in range(2):
            forwards = forward_requests(draft, subset, [count] * len(subset), seed)
            runner.run(forwards)
            advance(forwards)
        return capturer.count

    assert [graphs_after(count, caches) for count in (1, 2, 3)] == [1, 2, 2]
    assert [graphs_after(count, caches[:1]) for count in (1, 2)] == [3, 4]
    runner.evict(caches[1:])
    caches[1:] = caches_at(draft, (9,))
    assert capturer.count == 2
    runner.evict(caches[:1])
    assert graphs_after(3, caches) == 1
    assert (runner.counts["replayed"], runner.counts["refused"]) == (5, 0)


def test_a_batched_forward_of_many_tokens_runs_eagerly(draft: Transformer) -> None:
    capturer, lengths = ScriptedCapturer(exact_graph), [5] * 5
    runner, caches = GraphRunner(True, capturer, 1), caches_at(draft, lengths)
    max_count = MAX_STATIC_TOKENS // len(lengths)
    for count in (max_count + 1, max_count):
        assert capturer.captures == 0
        runner.run(forward_requests(draft, caches, [1] * 4 + [count], 0))
    assert capturer.captures == 1


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
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
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
    """Run concurrent requests on two ranks; the second captures by a script of `SCRIPTS`."""
    parallel.execution.cuda_graphs.USES = 2
    group, results = TensorParallelGroup.from_environment("cpu"), Results()
    pair = Pair(DEMO / "target", DEMO / "draft", group)
    for script in SCRIPTS:
        group.graph_capturer = ScriptedCapturer(script if group.rank else exact_graph)
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


SCRIPTS = [exact_graph, failed_capture]


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
