"""Recordings of passes are made when a kind has come often, compared before they are trusted, and
used on all ranks or on none.
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
from support.driving import tiered
from support.engines import DEMO, Pair
from support.links import CPU, make_test_link
from support.models import random_tokens
from support.ranks import run_ranks
from support.recording import (
    USES,
    Made,
    Scripted,
    baked,
    faithful,
    impossible,
    not_a_number,
    stale,
    streaming,
    wrong,
)
from support.slow import slow_except
from support.texts import prompt


@pytest.fixture(scope="module")
def draft() -> Transformer:
    return load_model(DEMO / "draft", TensorParallelGroup(), "float32")


def compared(runner: GraphRunner, model: Transformer, passes: int) -> None:
    """Passes of one token and of two in turn give the logits of an ordinary cache."""
    cache, plain = streaming(model), streaming(model)
    for seed in range(passes):
        tokens = random_tokens(1 + seed % 2, seed=seed)
        logits, wanted = runner(model, tokens, cache, 1), model(tokens, plain, 1)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        cache.advance(len(tokens))
        plain.advance(len(tokens))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (faithful, None),
        (wrong, "off by 0.02, in what it keeps by 0, and"),
        (stale, "off by "),
        (impossible, "RuntimeError('operation not permitted when stream is capturing')"),
        (not_a_number, "off by nan"),
    ],
)
def test_a_recording_is_compared_before_it_is_trusted(
    record: Any, why: str | None, draft: Transformer
) -> None:
    runner = GraphRunner(True, Scripted(record), USES)
    compared(runner, draft, 24)
    counts = runner.counts
    assert (counts["replayed"], counts["refused"]) == ((2, 0) if why is None else (0, 2))
    assert counts["seconds"] > 0
    assert (counts["why"] is None) if why is None else (why in counts["why"])


def test_what_was_recorded_is_what_runs(
    draft: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, launched = [], []

    def counting(function: Made) -> Made:
        return lambda: replayed.append(1) or function()

    runner, cache = GraphRunner(True, Scripted(counting), USES), streaming(draft)
    whole = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward", lambda *arguments: launched.append(1) or whole(*arguments)
    )
    for seed in range(10):
        runner(draft, random_tokens(1, seed=seed), cache, 1)
        cache.advance(1)
    assert len(replayed) == 10 - USES  # one of them to be compared
    # as they are, recorded, compared, within replays
    assert len(launched) == (USES - 1) + 1 + (1 + 1 + 1) + (10 - USES - 1)


def test_it_is_compared_where_it_was_not_made(draft: Transformer) -> None:
    """A draft that was rejected whole makes the next pass at the same place, where what is baked in
    does not show.
    """
    runner, cache = GraphRunner(True, Scripted(baked), USES), streaming(draft)
    for seed in range(USES + 5):
        runner(draft, random_tokens(1, seed=seed), cache, 1)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 0)
    cache.advance(1)
    runner(draft, random_tokens(1), cache, 1)
    assert (runner.counts["replayed"], runner.counts["refused"]) == (0, 1)


def test_a_kind_can_be_warmed_up(draft: Transformer) -> None:
    runner, cache = GraphRunner(True, GraphCapturer(CPU)), streaming(draft)
    runner.warm_up(draft, random_tokens(2), cache, 1)
    assert runner.counts["replayed"] == 1
    assert cache.length == 0


def test_a_recorder_that_broke_is_not_asked_again(draft: Transformer) -> None:
    recorder = Scripted(faithful)
    recorder.broken = "a capture before this one"
    runner = GraphRunner(True, recorder, USES)
    compared(runner, draft, 20)
    assert recorder.made == 0
    assert runner.counts["why"] == "a capture before this one"


def test_logits_outlive_the_next_pass(draft: Transformer) -> None:
    out = torch.zeros(1, draft.config.vocab)

    def in_place(function: Made) -> Made:  # as a graph does
        return lambda: out.copy_(function())

    runner, cache = GraphRunner(True, Scripted(in_place), USES), streaming(draft)
    outs = []
    for seed in range(USES + 4):
        outs.append(runner(draft, random_tokens(1, seed=seed), cache, 1))
        cache.advance(1)
    assert runner.counts["replayed"] == 1
    kept = [each.clone() for each in outs]
    runner(draft, random_tokens(1, seed=99), cache, 1)
    assert all(torch.equal(*pair) for pair in zip(outs, kept, strict=True))
    assert not torch.equal(outs[-1], outs[-2])


def test_long_passes_and_other_caches_go_as_they_are(draft: Transformer) -> None:
    recorder = Scripted(impossible)
    runner, cache = GraphRunner(True, recorder, 1), streaming(draft)
    whole = tiered(make_test_link("view"), 2)
    for _ in range(3):
        runner(draft, random_tokens(MAX_GRAPH_TOKENS + 1), cache, 1)
    assert recorder.made == 0
    logits = torch.zeros(1, 5)
    assert torch.equal(runner(lambda *_: logits, random_tokens(1), whole, 1), logits)  # type: ignore[arg-type]


def test_a_text_that_is_over_leaves_nothing_behind(draft: Transformer) -> None:
    """Memory for the next text is planned right away: nobody waits for a collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        runner, cache = GraphRunner(True, GraphCapturer(CPU), USES), streaming(draft)
        for seed in range(USES + 3):
            runner(draft, random_tokens(1, seed=seed), cache, 1)
            cache.advance(1)
        runner(draft, random_tokens(2), cache, 1)  # of a kind that was not recorded yet
        assert runner.counts["replayed"] == 1
        gone = weakref.ref(cache)
        runner.evict()
        del cache
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def demo() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize(
    ("mode", "budget"),
    slow_except(
        [
            ("speculative", 300),  # which has no budget to spend
            *product(("retrieval", "hierarchical"), (300, 4096)),
        ],
        3,
    ),
)
def test_every_level_proposes_the_same(
    mode: str, budget: int, demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy text would be the target's whatever is proposed; what stood of it would not."""
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
            text = list(engine.generate(prompt("typing"), 20, GREEDY))
            kinds = engine.stats.as_dict()["cuda_graphs"]
            if graphs:
                assert kinds["replayed"] > 0
                assert (kinds["refused"], kinds["why"]) == (0, None)
            else:
                assert kinds is None
            runs.append(
                (
                    text,
                    [(level.stats.proposed, level.stats.accepted) for level in engine.stats.levels],
                )
            )
    assert runs[0] == runs[1]


# two ranks take turns: behind less, and for fewer tokens
SHORT, FEW = 600, 24


@pytest.fixture(scope="module")
def reports() -> list[dict[Any, Any]]:
    """What each of two ranks found: they start once for all tests."""
    return run_ranks(2, on_a_rank, prompt("typing")[:SHORT])


def on_a_rank(tokens: list[int]) -> dict[Any, Any]:
    group = TensorParallelGroup.from_environment("cpu")
    return {
        **{("broken", rank): broken_on_one(group, rank) for rank in (0, 1)},
        **{case: failing_on_one(group, *case) for case in FAILURES},
        **{("text", shard): text_of(group, tokens, shard) for shard in (False, True)},
    }


def text_of(
    group: TensorParallelGroup, tokens: list[int], shard: bool
) -> tuple[list[int], bool, dict[str, Any] | None]:
    parallel.execution.cuda_graphs.USES = 2
    settings = Settings(dtype="float32", retrieval_budget=300, graphs=True, shard_draft=shard)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    engine.stop_tokens = frozenset()
    if group.rank:
        engine.run_worker()
        return [], cuda_graphs_supported(group), None
    text = list(engine.generate(tokens, FEW, GREEDY))
    engine.close()
    return text, cuda_graphs_supported(group), engine.stats.cuda_graphs


@pytest.mark.parametrize("shard", [False, True])
def test_over_two_ranks(shard: bool, demo: Pair, reports: list[dict[Any, Any]]) -> None:
    (text, possible, counts), (nothing, too, _) = (each["text", shard] for each in reports)
    assert text == demo.generate("plain", prompt("typing")[:SHORT], FEW)
    assert nothing == []
    assert counts is not None
    assert counts["replayed"] > 0
    assert counts["refused"] == 0
    assert possible is too is False  # a CPU records nothing


FAILURES = [(0, impossible), (1, impossible), (1, not_a_number)]


def failing_on_one(
    group: TensorParallelGroup, fails: int, record: Callable[[Made], Made]
) -> dict[str, Any]:
    model = load_model(DEMO / "draft", group, "float32")
    runner = GraphRunner(True, Scripted(record if group.rank == fails else faithful), USES)
    compared(runner, model, 20)
    return runner.counts


def broken_on_one(group: TensorParallelGroup, breaks: int) -> tuple[int, dict[str, Any]]:
    recorder = Scripted(faithful)
    recorder.broken = "a capture before this one" if group.rank == breaks else None
    runner = GraphRunner(True, recorder, USES)
    compared(runner, load_model(DEMO / "draft", group, "float32"), 14)
    return recorder.made, runner.counts


@pytest.mark.parametrize("breaks", [0, 1])
def test_nobody_captures_what_one_rank_will_not(breaks: int, reports: list[dict[Any, Any]]) -> None:
    for made, counts in (each["broken", breaks] for each in reports):
        assert made == 0
        assert (counts["refused"], counts["why"]) == (2, "a capture before this one")


@pytest.mark.parametrize("case", FAILURES)
def test_what_one_rank_cannot_record_no_rank_replays(
    case: tuple[int, Callable[[Made], Made]], reports: list[dict[Any, Any]]
) -> None:
    """Ranks that replayed and ranks that did not would take each other's sums."""
    for counts in (each[case] for each in reports):
        assert (counts["replayed"], counts["refused"]) == (0, 2)
        assert counts["why"]


def test_by_default_a_cpu_does_without() -> None:
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", Settings(retrieval_budget=300))
    assert engine.runtime.settings.graphs is False
    engine.close()
