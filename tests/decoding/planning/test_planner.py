"""Strategy selection: based on past requests, with a reason, and without effect on the output
distribution.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from decoding import GREEDY, Engine
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET, REJECTION_EXPONENT, RETRIEVAL_BUDGETS
from decoding.models.runtime import Runtime
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import ASSUMED_CPU, Trust
from decoding.planning.plan import Plan
from decoding.planning.planner import Planner
from decoding.speculation.draft_length import RoundStats
from offload.errors import InsufficientMemoryError
from parallel.model.loading import parameter_bytes
from support.engines import DEMO, Pair
from support.models import random_tokens
from support.planning import with_budget

PROMPT, NEW = 6000, 100
RATE = 1e8  # bytes/s


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft")


def runtime_of(pair: Pair, megabytes: float, **choices: Any) -> Runtime:
    """Return a runtime with this device memory beside the weights, and a link."""
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


def feasible(runtime: Runtime, prompt: int, max_new_tokens: int) -> dict[int, Plan]:
    """Return the plans by budget in the runtime's own mode."""
    planner = Planner(runtime.requirements, runtime.costs(None))
    plans = planner.candidates(prompt, max_new_tokens, runtime.memory())
    return {
        strategy.budget: plan for strategy, plan in plans.items() if strategy.mode == runtime.mode
    }


def planner_of(runtime: Runtime, rate: float = RATE) -> Planner:
    """Return a planner without history, whose forwards are bound by memory, and whose link is
    known.
    """
    machine = replace(ASSUMED_CPU, layer_s=0.0, forward_s=0.0, sample_s=0.0, draw_s=0.0)
    costs = CostModel(replace(machine, link_in=rate), trust=Trust.NONE)
    return Planner(runtime.requirements, costs)


def choose(planner: Planner, plans: dict[int, Plan]) -> Plan:
    return planner.choose({plan.requirements.strategy: plan for plan in plans.values()})


def budget_of(plan: Plan) -> int:
    return plan.requirements.strategy.budget


def with_layers(plan: Plan, layers: int) -> Plan:
    """Return the plan with another number of resident layers."""
    return replace(plan, memory=replace(plan.memory, resident_layers=layers))


def rounds(
    count: int, drafted: int, accepted: int, draft_s: float, verify_s: float
) -> list[RoundStats]:
    return [RoundStats(drafted, accepted, drafted + 1, draft_s * drafted, verify_s)] * count


def test_the_measured_rate_of_the_link_replaces_that_of_a_profile(pair: Pair) -> None:
    runtime = runtime_of(pair, 130)
    assert runtime.costs(3e9).hardware.link_in == 3e9
    assert runtime.costs(None).hardware.link_in == ASSUMED_CPU.link_in


def test_a_configured_budget_is_the_only_one(pair: Pair) -> None:
    plans = feasible(runtime_of(pair, 300, retrieval_budget=777), PROMPT, NEW)
    assert list(plans) == [777]


def test_a_larger_budget_leaves_fewer_layers(pair: Pair) -> None:
    plans = feasible(runtime_of(pair, 150), PROMPT, NEW)
    assert list(plans) == [budget for budget in RETRIEVAL_BUDGETS if budget < 2 * (PROMPT + NEW)]
    layers = [plan.memory.resident_layers for plan in plans.values()]
    assert layers == sorted(layers, reverse=True)
    assert layers[0] > layers[-1]
    small = feasible(runtime_of(pair, 100), PROMPT, NEW)
    assert set(small) < set(plans)
    with pytest.raises(InsufficientMemoryError, match="smaller `retrieval_budget`"):
        feasible(runtime_of(pair, 20), PROMPT, NEW)


def test_the_first_request_gets_the_default_budget_or_the_largest_that_fits(pair: Pair) -> None:
    for megabytes in (130, 100):
        runtime = runtime_of(pair, megabytes)
        plans = feasible(runtime, PROMPT, NEW)
        choice = choose(planner_of(runtime), plans)
        assert budget_of(choice) == max(
            budget for budget in plans if budget <= DEFAULT_RETRIEVAL_BUDGET
        )
        assert "no measurements" in choice.reason
        assert ("does not fit" in choice.reason) == (DEFAULT_RETRIEVAL_BUDGET not in plans)


@pytest.mark.parametrize(
    ("accepted", "draft_s", "larger"),
    [
        (24, 1e-4, False),  # everything is accepted: layers save transfer time
        (2, 1e-6, True),  # few tokens are accepted, and drafting is free
        (2, 0.5, False),  # few tokens are accepted, but drafting dominates
    ],
)
def test_past_requests_decide_the_budget(
    accepted: int, draft_s: float, larger: bool, pair: Pair
) -> None:
    runtime = runtime_of(pair, 130)
    planner, base = planner_of(runtime), feasible(runtime, PROMPT, NEW)
    plans = {
        budget: with_layers(base[budget], layers)
        for budget, layers in ((1024, 2), (2048, 1), (4096, 0))
    }
    link_s = plans[2048].link_bytes / RATE
    for _ in range(4):
        planner.record(plans[2048], rounds(20, 24, accepted, draft_s, link_s))
    choice = choose(planner, plans)
    assert budget_of(choice) > 2048 if larger else budget_of(choice) < 2048
    assert "ms/token predicted" in choice.reason
    assert "layers" in choice.reason


def test_compute_bound_rounds_give_memory_to_the_budget(pair: Pair) -> None:
    """The link could be ten times slower, so a larger budget replaces resident layers."""
    runtime = runtime_of(pair, 130)
    planner, plans = planner_of(runtime, 1e13), feasible(runtime, PROMPT, NEW)
    planner.record(plans[2048], rounds(20, 24, 8, 1e-6, 0.5))
    assert budget_of(choose(planner, plans)) > 2048


def test_small_predicted_gains_and_short_requests_change_nothing(pair: Pair) -> None:
    runtime = runtime_of(pair, 130)
    planner, plans = planner_of(runtime), feasible(runtime, PROMPT, NEW)
    planner.record(plans[1024], rounds(3, 24, 0, 1.0, 1.0))
    assert "no measurements" in choose(planner, plans).reason
    same = {budget: with_layers(plans[budget], 2) for budget in (1024, 2048)}
    planner.record(same[1024], rounds(20, 24, 24, 1e-4, 1e-2))
    assert budget_of(choose(planner, same)) == 1024


def test_a_prompt_within_its_budget_predicts_nothing_for_longer_ones(pair: Pair) -> None:
    runtime = runtime_of(pair, 130)
    planner = planner_of(runtime)
    planner.record(feasible(runtime, 1900, NEW)[2048], rounds(50, 24, 24, 1e-3, 1e-3))
    choice = choose(planner, feasible(runtime, PROMPT, NEW))
    assert budget_of(choice) == DEFAULT_RETRIEVAL_BUDGET
    assert "no measurements" in choice.reason
    short = choose(planner, feasible(runtime, 900, NEW))
    assert (budget_of(short), "fit" in short.reason) == (1024, False)


def test_caches_are_freed_before_the_next_request_is_planned(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    with pair.engine("hierarchical", link="emulated:50", gpu_kv_layers=1) as engine:
        tokens = engine.generate(random_tokens(600).tolist(), 9, GREEDY)
        next(tokens)
        (sequence,) = engine.sessions.executor.sequences
        previous = weakref.ref(sequence.retrieval)
        del sequence
        list(tokens)
        candidates = Planner.candidates
        monkeypatch.setattr(
            Planner,
            "candidates",
            lambda *args: (freed.append(previous() is None), candidates(*args))[1],
        )
        list(engine.generate(random_tokens(700).tolist(), 9, GREEDY))
    assert freed == [True]


def test_chunks_larger_than_the_smallest_budgets_keep_the_output(pair: Pair) -> None:
    prompt = random_tokens(400).tolist()
    plain = pair.generate("plain", prompt, 9)
    for mode, chunk in (
        ("retrieval", 1024),
        ("hierarchical", 1024),
        ("retrieval", 40_000),
        ("plain", 40_000),
    ):
        assert pair.generate(mode, prompt, 9, chunk_size=chunk) == plain


def test_a_request_that_never_fits_raises_with_any_mode(pair: Pair) -> None:
    runtime = runtime_of(pair, 5)
    for mode, choices in (
        ("hierarchical", {}),
        ("hierarchical", {"chunk_size": 1024}),
        ("plain", {}),
        ("retrieval", {"retrieval_budget": 700}),
    ):
        with pair.engine(
            mode, link="emulated:50", device_memory=runtime.settings.device_memory, **choices
        ) as engine:
            for attempt in (
                lambda: engine.plan(PROMPT, NEW),
                lambda: list(engine.generate(random_tokens(PROMPT).tolist(), NEW, GREEDY)),
            ):
                with pytest.raises(InsufficientMemoryError, match="GB are available"):
                    attempt()


def test_rejections_with_the_same_budget_weigh_more(pair: Pair) -> None:
    runtime = runtime_of(pair, 130)
    planner, plans = planner_of(runtime), feasible(runtime, PROMPT, NEW)
    # one in five rejected
    planner.record(plans[2048], rounds(2000, 10, 4, 1e-3, 1e-3))

    def rejection_of(budget: int) -> float:
        spec = replace(plans[2048].spec, requirements=with_budget(runtime.requirements, budget))
        return 1 - planner.costs.round_cost(replace(plans[2048], spec=spec)).acceptance

    rejection = {budget: rejection_of(budget) for budget in (512, 1024, 2048, 8192)}
    assert rejection[2048] == pytest.approx(0.2, rel=0.02)
    assert rejection[512] > rejection[1024] > rejection[2048] > rejection[8192]
    assert rejection[8192] == pytest.approx(0.2 * 4**-REJECTION_EXPONENT, rel=0.02)


def test_an_engine_reports_its_strategy_and_keeps_the_target_output(pair: Pair) -> None:
    memory = runtime_of(pair, 50).settings.device_memory
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
        stats = engine.stats.as_dict()
    assert stats["retrieval_budget"] in RETRIEVAL_BUDGETS
    assert "ms/token predicted" in stats["strategy_reason"]


def test_a_configured_budget_is_reported_as_set(pair: Pair) -> None:
    with pair.engine("retrieval", retrieval_budget=300) as engine:
        assert isinstance(engine, Engine)
        list(engine.generate(random_tokens(700).tolist(), 5, GREEDY))
        stats = engine.stats.as_dict()
        assert (stats["retrieval_budget"], stats["strategy_reason"]) == (300, "set")
    with pair.engine("plain") as engine:
        list(engine.generate(random_tokens(70).tolist(), 5, GREEDY))
        assert engine.stats.as_dict()["retrieval_budget"] is None
