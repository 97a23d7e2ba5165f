"""Budget, codes or layers: what is chosen follows from past texts, says why, and never changes the
law.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from decoding import GREEDY, Engine
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET, REJECTION_EXPONENT, RETRIEVAL_BUDGETS
from decoding.engine.session_manager import SequenceManager
from decoding.models.runtime import Runtime
from decoding.planning.fit import feasible_plans as affordable_with
from decoding.planning.measured_cost import MeasuredCosts
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Strategy
from decoding.planning.strategy_selector import StrategyChoice, StrategySelector
from decoding.speculation.draft_length import RoundStats
from offload.errors import InsufficientMemoryError
from parallel.model.loading import parameter_bytes
from support.engines import DEMO, Pair
from support.models import random_tokens
from support.planning import with_budget

PROMPT, NEW = 6000, 100
RATE = 1e8  # bytes a second


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


def models(pair: Pair, megabytes: float, **choices: Any) -> Runtime:
    """With so much device memory beside the weights, over a link."""
    assert pair.draft is not None
    weights = parameter_bytes(pair.target) + parameter_bytes(pair.draft)
    with pair.engine(
        "hierarchical",
        link="emulated:50",
        device_memory=weights + int(megabytes * 1e6),
        prefill_chunk=256,
        **choices,
    ) as engine:
        return engine.runtime


def affordable(runtime: Runtime, prompt: int, new: int) -> dict[int, MemoryPlan]:
    """By budget, in the runtime's own mode."""
    plans = affordable_with(runtime.requirements, runtime.memory(), prompt, new)
    return {way.budget: plan for way, plan in plans.items() if way.mode == runtime.mode}


class Past:
    """A chooser fed with past texts, on a link of a known rate."""

    def __init__(self, rate: float = RATE):
        self.costs = MeasuredCosts(rate)
        self.chooser = StrategySelector(self.costs)

    def choose(self, runtime: Runtime, plans: dict[int, MemoryPlan], prompt: int) -> StrategyChoice:
        ways = {Strategy(runtime.mode, budget): plan for budget, plan in plans.items()}
        return self.chooser.select(runtime.requirements, ways, prompt)

    def record(
        self, runtime: Runtime, budget: int, plan: MemoryPlan, past: list[RoundStats]
    ) -> None:
        self.chooser.record(with_budget(runtime.requirements, budget), plan, PROMPT, past)

    def rejection(self, runtime: Runtime, budget: int, plan: MemoryPlan) -> float:
        return self.costs.rejection(with_budget(runtime.requirements, budget), plan)


def rounds(
    count: int, drafted: int, accepted: int, draft_s: float, verify_s: float
) -> list[RoundStats]:
    return [RoundStats(drafted, accepted, drafted + 1, draft_s * drafted, verify_s)] * count


def test_a_budget_that_is_set_is_the_only_one(pair: Pair) -> None:
    found = affordable(models(pair, 300, retrieval_budget=777), PROMPT, NEW)
    assert list(found) == [777]


def test_more_budget_leaves_fewer_layers(pair: Pair) -> None:
    found = affordable(models(pair, 150), PROMPT, NEW)
    assert list(found) == [budget for budget in RETRIEVAL_BUDGETS if budget < 2 * (PROMPT + NEW)]
    layers = [place.resident_layers for place in found.values()]
    assert layers == sorted(layers, reverse=True)
    assert layers[0] > layers[-1]
    small = affordable(models(pair, 100), PROMPT, NEW)
    assert set(small) < set(found)
    with pytest.raises(InsufficientMemoryError, match="smaller `retrieval_budget`"):
        affordable(models(pair, 20), PROMPT, NEW)


def test_the_first_text_gets_the_usual_budget_or_what_fits(pair: Pair) -> None:
    for megabytes in (130, 100):
        on = models(pair, megabytes)
        plans = affordable(on, PROMPT, NEW)
        choice = Past().choose(on, plans, PROMPT)
        assert choice.strategy.budget == max(
            budget for budget in plans if budget <= DEFAULT_RETRIEVAL_BUDGET
        )
        assert "nothing is known" in choice.why
        assert ("does not fit" in choice.why) == (DEFAULT_RETRIEVAL_BUDGET not in plans)


@pytest.mark.parametrize(
    ("accepted", "draft_s", "larger"),
    [
        (24, 1e-4, False),  # all stands: layers save link time
        (2, 1e-6, True),  # little stands, and drafting costs nothing
        (2, 0.5, False),  # little stands, but drafting is the cost
    ],
)
def test_what_past_texts_showed_decides(
    accepted: int, draft_s: float, larger: bool, pair: Pair
) -> None:
    on, split = models(pair, 130), Past()
    some = affordable(on, PROMPT, NEW)
    plans = {
        budget: replace(some[budget], resident_layers=layers)
        for budget, layers in ((1024, 2), (2048, 1), (4096, 0))
    }
    far = on.target.config.layers - plans[2048].resident_layers
    link_s = on.target.config.kv_layout(1, on.dtype).bytes(PROMPT, far) / RATE
    for _ in range(4):
        split.record(on, 2048, plans[2048], rounds(20, 24, accepted, draft_s, link_s))
    choice = split.choose(on, plans, PROMPT)
    chosen = choice.strategy.budget
    assert chosen > 2048 if larger else chosen < 2048
    assert "ms/token predicted" in choice.why
    assert "layers" in choice.why


def test_layers_are_worth_nothing_where_compute_is_the_cost(pair: Pair) -> None:
    """The link could be ten times as slow: a larger budget is taken, though it takes the layers."""
    on, split = models(pair, 130), Past(1e13)
    plans = affordable(on, PROMPT, NEW)
    split.record(on, 2048, plans[2048], rounds(20, 24, 8, 1e-6, 0.5))
    assert split.choose(on, plans, PROMPT).strategy.budget > 2048


def test_a_small_promise_changes_nothing_and_a_short_text_says_nothing(pair: Pair) -> None:
    on, split = models(pair, 130), Past()
    plans = affordable(on, PROMPT, NEW)
    split.record(on, 1024, plans[1024], rounds(3, 24, 0, 1.0, 1.0))
    assert "nothing is known" in split.choose(on, plans, PROMPT).why
    same = {
        budget: replace(place, resident_layers=2)
        for budget, place in plans.items()
        if budget in (1024, 2048)
    }
    split.record(on, 1024, same[1024], rounds(20, 24, 24, 1e-4, 1e-2))
    assert split.choose(on, same, PROMPT).strategy.budget == 1024


def test_a_text_within_its_budget_says_nothing_of_longer_ones(pair: Pair) -> None:
    on, split = models(pair, 130), Past()
    place = affordable(on, 1900, NEW)[2048]
    split.chooser.record(
        with_budget(on.requirements, 2048), place, 1900, rounds(50, 24, 24, 1e-3, 1e-3)
    )
    choice = split.choose(on, affordable(on, PROMPT, NEW), PROMPT)
    assert choice.strategy.budget == DEFAULT_RETRIEVAL_BUDGET
    assert "nothing is known" in choice.why
    short = split.choose(on, affordable(on, 900, NEW), 900)
    assert (short.strategy.budget, "fit" in short.why) == (1024, False)


def test_the_caches_of_a_text_are_gone_before_the_next_is_planned(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    with pair.engine("hierarchical", link="emulated:50", gpu_kv_layers=1) as engine:
        list(engine.generate(random_tokens(600).tolist(), 9, GREEDY))
        assert engine.stats.retrieval is not None
        before = weakref.ref(engine.stats.retrieval)
        planned = SequenceManager.select_strategy
        monkeypatch.setattr(
            SequenceManager,
            "select_strategy",
            lambda *given: (seen.append(before() is None), planned(*given))[1],
        )
        list(engine.generate(random_tokens(700).tolist(), 9, GREEDY))
    assert seen == [True]


def test_chunks_larger_than_the_smallest_budgets(pair: Pair) -> None:
    prompt = random_tokens(400).tolist()
    plain = pair.generate("plain", prompt, 9)
    for mode, chunk in (
        ("retrieval", 1024),
        ("hierarchical", 1024),
        ("retrieval", 40_000),
        ("plain", 40_000),
    ):
        assert pair.generate(mode, prompt, 9, chunk_size=chunk) == plain


def test_what_fits_nowhere_is_refused_as_ever(pair: Pair) -> None:
    on = models(pair, 5)
    for mode, choices in (
        ("hierarchical", {}),
        ("hierarchical", {"chunk_size": 1024}),
        ("plain", {}),
        ("retrieval", {"retrieval_budget": 700}),
    ):
        with pair.engine(
            mode, link="emulated:50", device_memory=on.settings.device_memory, **choices
        ) as engine:
            for attempt in (
                lambda: engine.plan(PROMPT, NEW),
                lambda: list(engine.generate(random_tokens(PROMPT).tolist(), NEW, GREEDY)),
            ):
                with pytest.raises(InsufficientMemoryError, match="GB are available"):
                    attempt()


def test_rejections_of_a_budget_itself_count_for_more_than_those_of_others(pair: Pair) -> None:
    on, split = models(pair, 130), Past()
    place = affordable(on, PROMPT, NEW)[2048]
    # one in five
    split.record(on, 2048, place, rounds(2000, 10, 4, 1e-3, 1e-3))
    seen = {budget: split.rejection(on, budget, place) for budget in (512, 1024, 2048, 8192)}
    assert seen[2048] == pytest.approx(0.2, rel=0.02)
    assert seen[512] > seen[1024] > seen[2048] > seen[8192]
    assert seen[8192] == pytest.approx(0.2 * 4**-REJECTION_EXPONENT, rel=0.02)


def test_an_engine_says_what_it_chose_and_writes_the_targets_text(pair: Pair) -> None:
    memory = models(pair, 50).settings.device_memory
    prompts = [random_tokens(2100 + count).tolist() for count in range(2)]
    plain = [pair.generate("plain", prompt, 40) for prompt in prompts]
    with pair.engine(
        "hierarchical",
        link="emulated:0.5",
        device_memory=memory,
        num_draft_tokens=8,
        prefill_chunk=256,
    ) as engine:
        assert [list(engine.generate(prompt, 40, GREEDY)) for prompt in prompts] == plain
        found = engine.stats.as_dict()
    assert found["retrieval_budget"] in RETRIEVAL_BUDGETS
    assert "ms/token predicted" in found["strategy_reason"]


def test_a_budget_that_is_set_is_said_to_be(pair: Pair) -> None:
    with pair.engine("retrieval", retrieval_budget=300) as engine:
        assert isinstance(engine, Engine)
        list(engine.generate(random_tokens(700).tolist(), 5, GREEDY))
        assert (
            engine.stats.as_dict()["retrieval_budget"],
            engine.stats.as_dict()["strategy_reason"],
        ) == (
            300,
            "set",
        )
    with pair.engine("plain") as engine:
        list(engine.generate(random_tokens(70).tolist(), 5, GREEDY))
        assert engine.stats.as_dict()["retrieval_budget"] is None
