"""Passes that several texts share are recorded as those of one are: each combination of texts and
tokens when it has come often, until one of these texts is over.
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
from support.engines import DEMO, Pair
from support.models import random_tokens
from support.ranks import run_ranks
from support.recording import (
    USES,
    Scripted,
    baked,
    count_replays,
    faithful,
    impossible,
    streaming,
)
from support.slow import slow_except

TEXTS = 3


@pytest.fixture(scope="module")
def draft() -> Transformer:
    return load_model(DEMO / "draft", TensorParallelGroup(), "float32")


def caches_at(model: Transformer, lengths: Sequence[int]) -> list[StreamingCache]:
    """Caches that stand behind so many tokens of texts of their own."""
    caches = [streaming(model) for _ in lengths]
    for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        model(random_tokens(length, seed=seed), cache, 1)
        cache.advance(length)
    return caches


def asked(
    model: Transformer,
    caches: Sequence[StreamingCache],
    counts: Sequence[int],
    seed: int,
    rows: int = 1,
) -> list[ForwardRequest]:
    return [
        ForwardRequest(model, cache, random_tokens(count, seed=100 * seed + text), rows)
        for text, (cache, count) in enumerate(zip(caches, counts, strict=True))
    ]


def advance(passes: Sequence[ForwardRequest]) -> None:
    for each in passes:
        each.cache.advance(len(each.tokens))


@pytest.mark.parametrize("lengths", [(5, 31, 120), (120, 31, 5)])
@pytest.mark.parametrize("rows", [1, 2])
def test_texts_of_any_lengths_are_replayed_together(
    lengths: tuple[int, ...], rows: int, draft: Transformer
) -> None:
    """Where a window slides, be it for the sake of others, where tokens are taken back, and of
    texts that read more tokens than others.
    """
    recorder = Scripted(faithful)
    runner = GraphRunner(True, recorder, USES)
    caches, plain = caches_at(draft, lengths), caches_at(draft, lengths)
    for seed in range(16):
        counts = (2, 2, 3) if seed % 2 else (2, 2, 2)
        for cache in plain:
            cache.begin_forward(max(counts))
        found = runner.run(asked(draft, caches, counts, seed, rows))
        wanted = run_forward(asked(draft, plain, counts, seed, rows))
        for logits, want in zip(found, wanted, strict=True):
            assert len(logits) == rows
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
        for cache, count in zip((*caches, *plain), counts * 2, strict=True):
            cache.advance(count)
            cache.crop(cache.length - seed % 2)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (2, 0)
    assert recorder.made == 2
    assert max(cache._dropped for cache in caches) > 0


def test_it_is_compared_where_no_text_stood_when_it_was_made(draft: Transformer) -> None:
    runner, caches = GraphRunner(True, Scripted(baked), USES), caches_at(draft, (5, 31, 40))
    for seed in range(USES + 3):
        runner.run(asked(draft, caches, (1, 1, 1), seed))
        for cache in caches[1:]:
            cache.advance(1)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 0)
    caches[0].advance(1)
    runner.run(asked(draft, caches, (1, 1, 1), 99))
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 1)
    assert "off by" in runner.counts["why"]


def test_a_text_that_is_over_takes_what_it_shared_along(draft: Transformer) -> None:
    gc.collect()
    gc.disable()
    try:
        recorder = Scripted(faithful)
        runner, caches = GraphRunner(True, recorder, USES), caches_at(draft, (5, 31, 40))
        for seed in range(USES + 2):
            for some in (caches, caches[:2]):
                passes = asked(draft, some, [1] * len(some), seed)
                runner.run(passes)
                advance(passes)
        assert recorder.count == runner.counts["replayed"] == 2
        gone = weakref.ref(caches[2])
        runner.evict([caches.pop()])
        del passes, some
        assert gone() is None
        assert recorder.count == 1
        seconds = runner.counts["seconds"]
        runner.run(asked(draft, caches, (1, 1), 99))
        assert runner.counts["seconds"] == seconds  # it was a replay
        runner.evict(caches[1:])
        assert recorder.count == 0
    finally:
        gc.enable()


def test_shared_recordings_are_limited_and_others_are_not(
    draft: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.execution.cuda_graphs, "MAX_GRAPHS", 2)
    recorder = Scripted(faithful)
    runner, caches = GraphRunner(True, recorder, 1), caches_at(draft, (5, 31))

    def come(count: int, some: list[StreamingCache]) -> int:
        """How many recordings there are behind such passes."""
        for seed in range(2):
            passes = asked(draft, some, [count] * len(some), seed)
            runner.run(passes)
            advance(passes)
        return recorder.count

    assert [come(count, caches) for count in (1, 2, 3)] == [1, 2, 2]
    assert [come(count, caches[:1]) for count in (1, 2)] == [3, 4]
    runner.evict(caches[1:])
    caches[1:] = caches_at(draft, (9,))
    assert recorder.count == 2
    runner.evict(caches[:1])
    assert come(3, caches) == 1
    assert (runner.counts["replayed"], runner.counts["refused"]) == (5, 0)


def test_a_pass_of_many_tokens_in_all_goes_as_it_is(draft: Transformer) -> None:
    recorder, lengths = Scripted(faithful), [5] * 5
    runner, caches = GraphRunner(True, recorder, 1), caches_at(draft, lengths)
    most = MAX_STATIC_TOKENS // len(lengths)
    for count in (most + 1, most):
        assert recorder.made == 0
        runner.run(asked(draft, caches, [1] * 4 + [count], 0))
    assert recorder.made == 1


SIZES = [(60, 12), (33, 20), (90, 16), (41, 12)]  # so one is left alone, and one comes later


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize(
    ("mode", "resident"),
    slow_except([("retrieval", 1), ("speculative", None), ("hierarchical", 1)], 0, 2),
)
def test_texts_at_once_are_those_alone(
    mode: str, resident: int | None, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.execution.cuda_graphs, "USES", 2)
    replays, want = count_replays(monkeypatch), requests(GREEDY, SIZES)
    with demo.engine(mode, graphs=False, gpu_kv_layers=resident, **SMALL) as engine:
        wanted = run_alone(engine, want)
    with demo.engine(mode, graphs=True, gpu_kv_layers=resident, **SMALL) as engine:
        texts = run_batch(engine, want, TEXTS)
    assert tokens(texts) == wanted
    counts = [text.stats.cuda_graphs for text in texts]
    assert all(each is not None and each["refused"] == 0 for each in counts)
    assert (TEXTS, 1) in replays


Found = list[tuple[list[list[int]], dict[str, Any], list[tuple[int, int]]]]


def on_a_rank() -> Found:
    """Texts at once on two ranks, of which the second records as it is told."""
    parallel.execution.cuda_graphs.USES = 2
    group, found = TensorParallelGroup.from_environment("cpu"), Found()
    pair = Pair(DEMO / "target", DEMO / "draft", group)
    for record in RECORDS:
        group.graph_capturer = Scripted(record if group.rank else faithful)
        with pytest.MonkeyPatch.context() as patch:
            replays = count_replays(patch)
            with pair.engine("hierarchical", graphs=True, **SMALL) as engine:
                if group.rank:
                    engine.run_worker()
                    found.append(([], {}, replays))
                    continue
                texts = run_batch(engine, requests(GREEDY, SIZES[:TEXTS]), TEXTS)
                engine.close()
        assert texts[0].stats.cuda_graphs is not None
        found.append((tokens(texts), texts[0].stats.cuda_graphs, replays))
    return found


RECORDS = [faithful, impossible]


def test_over_two_ranks(demo: Pair) -> None:
    with demo.engine("plain") as engine:
        wanted = run_alone(engine, requests(GREEDY, SIZES[:TEXTS]))
    led, followed = run_ranks(2, on_a_rank)
    for record, (texts, counts, replays), (_, _, others) in zip(
        RECORDS, led, followed, strict=True
    ):
        assert texts == wanted
        on_both = [each for each in replays if each[1] == 2]  # others are the draft's, on rank 0
        assert on_both == others
        assert ((TEXTS, 2) in others) == (counts["why"] is None) == (record is faithful)
