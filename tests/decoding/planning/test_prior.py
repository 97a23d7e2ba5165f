"""The first request uses the hardware prior; later ones use measurements of past requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from decoding import GREEDY, Engine, Settings
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET
from decoding.planning.cost import Acceptance, PredictedCosts
from decoding.planning.fit import Memory, feasible_plans
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.measured_cost import MeasuredCosts
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Requirements, Strategy
from decoding.planning.prior import HardwarePrior, find_prior
from decoding.planning.strategy_selector import StrategySelector
from decoding.speculation.draft_length import RoundStats
from offload.dtypes import dtype_spec
from offload.errors import TierForceError
from support.engines import DEMO
from support.planning import case_of
from support.prompts import prompt

PROMPT, NEW = 20_000, 200
WHOLE, SPLIT = "retrieval", "split-retrieval"
MACHINE = HardwareProfile(
    "mine",
    1,
    1e9,
    1e10,
    1e9,
    1e9,
    1e11,
    1e13,
    0.0,
    1e9,
    1e-6,
    reconstruct_rate=2e9,
    high_bits_rate=5e9,
)


def requirements_of() -> Requirements:
    settings = Settings(mode="auto", dtype="bfloat16", prefill_chunk=256)
    model = replace(case_of(1).target, layers=24, kv_heads=4)
    return Requirements(model, None, WHOLE, settings, dtype_spec("bfloat16"), 1, 1, copies=True)


def plans_of(requirements: Requirements, host: float = 2.0) -> dict[Strategy, MemoryPlan]:
    """Return plans with device memory for 60% of the KV, beside buffers of fixed size."""
    kv, fixed = requirements.layout.bytes(PROMPT + NEW), requirements.memory(PROMPT, NEW)
    device = int(0.6 * kv) + fixed.hidden + fixed.forwards + fixed.tables
    return feasible_plans(requirements, Memory(device, int(host * kv)), PROMPT, NEW)


def fastest(
    requirements: Requirements,
    plans: Mapping[Strategy, MemoryPlan],
    machine: HardwareProfile,
    concurrency: int = 1,
) -> Strategy:
    """Return the strategy with the fewest seconds per token predicted for a machine."""
    costs = PredictedCosts(machine, Acceptance(), concurrency)

    def seconds(strategy: Strategy) -> float:
        cost = costs.round_cost(requirements.with_strategy(strategy), plans[strategy], PROMPT)
        return cost.best_length(requirements.draft_lengths)[1]

    return min(plans, key=seconds)


def test_gpus_are_identified_by_their_driver_name() -> None:
    for gpu, ranks, name in [
        ("NVIDIA GeForce RTX 4090", 1, "1x4090"),
        ("NVIDIA GeForce RTX 4090", 2, "2x4090"),
        ("NVIDIA GeForce RTX 3090", 2, "2x3090"),
        ("NVIDIA A100-SXM4-80GB", 1, "1xA100-80"),
        ("NVIDIA A100 80GB PCIe", 1, "1xA100-80"),
    ]:
        assert find_prior(None, gpu, ranks) == HardwarePrior(
            HardwareProfile.from_name(name), is_measured=False
        )
    for gpu, ranks in [
        ("NVIDIA GeForce RTX 4090", 3),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 1),
        ("NVIDIA GeForce RTX 3090", 1),
        ("an unknown GPU", 1),
        ("", 1),
    ]:
        assert find_prior(None, gpu, ranks) is None


def test_a_hardware_file_must_have_the_same_number_of_gpus(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    prior = find_prior(str(path), "NVIDIA GeForce RTX 4090", 1)
    assert prior == HardwarePrior(MACHINE, is_measured=True)
    assert find_prior("1x4090", "", 1) == HardwarePrior(
        HardwareProfile.from_name("1x4090"), is_measured=False
    )
    with pytest.raises(TierForceError, match=r"for 1 GPUs, and this run has 2: measure with `tier"):
        find_prior(str(path), "", 2)
    with pytest.raises(
        TierForceError, match="`hardware` nowhere is neither a file nor a known machine"
    ):
        find_prior("nowhere", "", 1)


def test_the_prior_uses_the_measured_link_rate() -> None:
    prior = HardwarePrior(MACHINE, is_measured=True)
    assert prior.with_link(5e8).machine == replace(MACHINE, link_in=5e8)
    assert prior.with_link(None) == prior


@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11])
def test_the_first_request_gets_the_strategy_predicted_fastest(rate: float) -> None:
    requirements, machine = requirements_of(), replace(MACHINE, link_in=rate)
    plans = plans_of(requirements)
    assert {strategy.mode for strategy in plans} == {WHOLE, SPLIT}
    costs = MeasuredCosts(rate)
    choice = StrategySelector(costs, HardwarePrior(machine, is_measured=True)).select(
        requirements, plans, PROMPT
    )
    assert choice.strategy == fastest(requirements, plans, machine)
    assert choice.why.startswith("by the numbers of mine: ")
    # Split modes require measured rates of this machine.
    unsplit = {strategy: plan for strategy, plan in plans.items() if strategy.mode == WHOLE}
    for prior in (
        HardwarePrior(machine, is_measured=False),
        HardwarePrior(replace(machine, reconstruct_rate=None), is_measured=True),
        HardwarePrior(replace(machine, high_bits_rate=None), is_measured=True),
    ):
        choice = StrategySelector(costs, prior).select(requirements, plans, PROMPT)
        assert choice.strategy == fastest(requirements, unsplit, prior.machine)


def test_the_first_of_several_requests_is_planned_as_one_of_a_batch() -> None:
    """Requests use the link in turn and share each read of the weights."""
    requirements = requirements_of()
    plans = plans_of(requirements)
    rates = [10.0 ** (step / 4) for step in range(24, 48)]
    strategies = set()
    for rate in rates:
        machine = replace(MACHINE, link_in=rate)
        selector = StrategySelector(MeasuredCosts(rate), HardwarePrior(machine, is_measured=True))
        for concurrency in (1, 6):
            choice = selector.select(requirements, plans, PROMPT, concurrency)
            assert choice.strategy == fastest(requirements, plans, machine, concurrency)
            strategies.add((rate, choice.strategy))
    assert len(strategies) > len(rates)  # concurrency changes the strategy at some rate


def test_a_slower_link_makes_a_larger_budget_pay() -> None:
    requirements = requirements_of()
    plans = {
        strategy: plan
        for strategy, plan in plans_of(requirements).items()
        if strategy.mode == WHOLE
    }
    budgets = [
        fastest(requirements, plans, replace(MACHINE, link_in=rate)).budget for rate in (1e12, 1e7)
    ]
    assert budgets == sorted(set(budgets))


def test_a_shipped_profile_selects_a_split_mode_if_nothing_else_fits() -> None:
    requirements = requirements_of()
    plans = plans_of(requirements, host=0.5)
    assert {strategy.mode for strategy in plans} == {SPLIT}
    selector = StrategySelector(MeasuredCosts(1e9), HardwarePrior(MACHINE, is_measured=False))
    assert selector.select(requirements, plans, PROMPT).strategy == fastest(
        requirements, plans, MACHINE
    )


def test_measurements_override_the_prior() -> None:
    requirements = requirements_of()
    plans = plans_of(requirements)
    wrong = replace(MACHINE, memory_rate=1e6, matmul=1e7)
    with_prior = StrategySelector(MeasuredCosts(1e8), HardwarePrior(wrong, is_measured=True))
    without = StrategySelector(MeasuredCosts(1e8))
    strategy = Strategy(WHOLE, DEFAULT_RETRIEVAL_BUDGET)
    past = [RoundStats(24, 8, 25, 24e-3, 0.5)] * 40
    for selector in (with_prior, without):
        selector.record(requirements.with_strategy(strategy), plans[strategy], PROMPT, past)
    assert with_prior.select(requirements, plans, PROMPT) == without.select(
        requirements, plans, PROMPT
    )


def test_an_engine_uses_its_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    tokens = (3 * prompt("argparse"))[:1500]
    reasons = []
    for hardware in (None, str(path)):
        settings = Settings(
            hardware=hardware, dtype="bfloat16", link="emulated:50", gpu_kv_layers=0
        )
        with closing(Engine.from_pretrained(DEMO / "target", settings=settings)) as engine:
            list(engine.generate(tokens, 6, GREEDY))
            assert engine.stats.strategy is not None
            reasons.append(engine.stats.strategy.why)
    assert "no measurements of these models yet" in reasons[0]
    assert reasons[1].startswith("by the numbers of mine: ")
    two = tmp_path / "two.json"
    two.write_text(json.dumps(asdict(replace(MACHINE, gpus=2))))
    with pytest.raises(TierForceError, match=r"two\.json is for 2 GPUs, and this run has 1"):
        Engine.from_pretrained(DEMO / "target", settings=Settings(hardware=str(two)))
