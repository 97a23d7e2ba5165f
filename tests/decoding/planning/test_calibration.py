"""Measured rounds correct a profile: its ratios stay, and its seconds become those measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET, UNUSED_DRIFT
from decoding.config.settings import Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import ASSUMED_CPU, HardwareProfile
from decoding.planning.plan import Memory, Plan
from decoding.planning.planner import Planner
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements, Strategy
from decoding.planning.round_cost import RoundCost
from decoding.speculation.draft_length import RoundStats
from offload.dtypes import dtype_spec
from support.planning import case_of
from support.slow import slow_except

PROMPT, NEW = 20_000, 200
WHOLE, SPLIT = "retrieval", "split-retrieval"
DEFAULT = Strategy(WHOLE, DEFAULT_RETRIEVAL_BUDGET)
RATES = ["memory_rate", "matmul", "kv_rate", "attention", "score_rate", "reconstruct_rate"]
RATES += ["high_bits_rate", "int8_rate"]
SECONDS = ["layer_s", "forward_s", "sample_s", "draw_s"]


def plans_on(machine: HardwareProfile) -> dict[Strategy, Plan]:
    """Return the plans of a request whose KV fits the device to 60%."""
    settings = Settings(mode="auto", dtype="bfloat16", prefill_chunk=256)
    model = replace(case_of(1).target, layers=24, kv_heads=4)
    needs = Requirements(model, None, WHOLE, settings, dtype_spec("bfloat16"), 1, 1, copies=True)
    kv, fixed = needs.layout.bytes(PROMPT + NEW), RequestSpec(needs, PROMPT, NEW).memory
    memory = Memory(int(0.6 * kv) + fixed.hidden + fixed.forwards + fixed.tables, 2 * kv)
    return Planner(needs, CostModel(machine)).candidates(PROMPT, NEW, memory)


def times_slower(machine: HardwareProfile, factor: float) -> HardwareProfile:
    """Return a machine whose every forward takes `factor` times as long, over the same link."""
    rates = {name: getattr(machine, name) / factor for name in RATES}
    return replace(machine, **rates, **{name: factor * getattr(machine, name) for name in SECONDS})


def rounds_of(costs: CostModel, plan: Plan, drafted: int = 8) -> list[RoundStats]:
    """Return rounds that take what a cost model predicts."""
    cost = costs.round_cost(plan)
    seconds = drafted * cost.drafted_s, cost.verification_s(drafted)
    return [RoundStats(drafted, drafted - 1, drafted + 1, *seconds)] * 40


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_one_request_corrects_a_profile_that_is_wrong_by_a_factor(factor: float) -> None:
    machine = replace(ASSUMED_CPU, link_in=1e12)  # forwards are bound by compute
    plans, actual = plans_on(machine), CostModel(machine)
    assumed = CostModel(times_slower(machine, factor))
    before = assumed.round_cost(plans[DEFAULT]).verification_s(8)
    assert before == pytest.approx(factor * actual.round_cost(plans[DEFAULT]).verification_s(8))
    rounds = rounds_of(actual, plans[DEFAULT])
    assert assumed.record(plans[DEFAULT], rounds)
    assert {strategy.mode for strategy in plans} == {WHOLE, SPLIT}
    actual.record(plans[DEFAULT], rounds)
    for plan in plans.values():
        expected, corrected = actual.round_cost(plan), assumed.round_cost(plan)
        for drafted in (1, 8, 30):
            assert corrected.verification_s(drafted) == pytest.approx(
                expected.verification_s(drafted), rel=0.02
            )
        assert corrected.drafted_s == pytest.approx(expected.drafted_s, rel=0.02)
        assert corrected.acceptance == pytest.approx(expected.acceptance)


def test_compute_that_the_link_hides_is_bounded_by_what_was_measured() -> None:
    """A profile that predicts too much is corrected; one that predicts too little is not known."""
    machine = replace(ASSUMED_CPU, link_in=1e8)
    plans, actual = plans_on(machine), CostModel(machine)
    plan = plans[DEFAULT]
    rounds = rounds_of(actual, plan)
    (whole_s,) = {stats.verify_s for stats in rounds}
    assert actual.round_cost(plan).verification_bound(8) == "link"
    for factor in (1e-3, 1e3):
        costs = CostModel(times_slower(machine, factor))
        before = costs.round_cost(plan).compute_s(8)
        costs.record(plan, rounds)
        cost = costs.round_cost(plan)
        assert cost.verification_s(8) == pytest.approx(whole_s, rel=0.01)
        assert cost.compute_s(8) == pytest.approx(min(before, whole_s), rel=0.01)


def test_a_link_slower_than_its_profile_is_not_taken_for_compute() -> None:
    """The ratio of the link holds for all modes, also for one that was not measured."""
    machine = replace(ASSUMED_CPU, link_in=1e8)
    plans, costs = plans_on(machine), CostModel(machine)
    predicted = {strategy: costs.round_cost(plan) for strategy, plan in plans.items()}
    slower = CostModel(replace(machine, link_in=0.7e8))
    for _ in range(3):
        costs.record(plans[DEFAULT], rounds_of(slower, plans[DEFAULT]))
    for strategy, plan in plans.items():
        cost = costs.round_cost(plan)
        assert cost.link_s == pytest.approx(predicted[strategy].link_s / 0.7)
        assert cost.compute_s(8) == pytest.approx(predicted[strategy].compute_s(8), rel=0.05)


@pytest.mark.parametrize("stalled", slow_except([1, 5], 1))
def test_one_stalled_request_does_not_decide_forever(stalled: int) -> None:
    machine = replace(ASSUMED_CPU, link_in=2e7)
    plans, actual = plans_on(machine), CostModel(machine)
    planner = Planner(plans[DEFAULT].requirements, CostModel(machine))
    best = min(plans.values(), key=actual.token_s)
    chosen = []
    for number in range(60):
        plan = planner.choose(plans)
        rounds = rounds_of(actual, plan)
        if number == stalled:
            rounds = [
                replace(each, draft_s=5 * each.draft_s, verify_s=5 * each.verify_s)
                for each in rounds
            ]
        planner.record(plan, rounds)
        chosen.append(plan)
    assert chosen[stalled].requirements.mode == best.requirements.mode
    assert {plan.requirements.mode for plan in chosen[-10:]} == {best.requirements.mode}
    assert actual.token_s(chosen[-1]) < 1.1 * actual.token_s(best)


def test_each_mode_is_corrected_by_its_own_last_request() -> None:
    machine = replace(ASSUMED_CPU, link_in=1e12)
    plans, costs = plans_on(machine), CostModel(machine)
    split = plans[Strategy(SPLIT, DEFAULT_RETRIEVAL_BUDGET)]
    costs.record(plans[DEFAULT], rounds_of(CostModel(times_slower(machine, 2)), plans[DEFAULT]))
    costs.record(split, rounds_of(CostModel(times_slower(machine, 5)), split))
    predicted = CostModel(machine)
    for plan, factor in ((plans[DEFAULT], 2 + UNUSED_DRIFT * (5 - 2)), (split, 5)):
        ratio = costs.round_cost(plan).compute_s(8) / predicted.round_cost(plan).compute_s(8)
        assert ratio == pytest.approx(factor, rel=0.02)


def test_a_draft_hides_the_transfer_of_what_the_ring_holds() -> None:
    cost = RoundCost(
        link_s=1.0,
        compute_s=lambda drafted: 0.5,
        drafted_s=0.1,
        acceptance=0.9,
        uncovered_s=0.2,
        ahead_s=0.6,
    )
    assert [cost.verification_s(drafted) for drafted in (0, 1, 4)] == [1.0, 0.9, 0.6]
    assert cost.verification_s(10) == 0.5  # the first slot's copy is hidden, too
    assert [cost.verification_bound(drafted) for drafted in (4, 10)] == ["link", "compute"]
    plain = replace(cost, link_s=0.1, ahead_s=0.1)
    assert plain.verification_s(0) == 0.7
    for factor in (0.5, 1.0, 3.0):
        for drafting_s in (0.0, 0.2, 5.0):
            hidden = min(factor * cost.ahead_s, drafting_s)
            measured = factor * cost.link_s - hidden
            assert cost.link_ratio(measured, drafting_s) == pytest.approx(factor)
    assert cost.compute_ratio(4, 1.2, 0.0) == pytest.approx(2.0)
    assert cost.compute_ratio(4, 1.0, 0.3) == pytest.approx(2.0)
