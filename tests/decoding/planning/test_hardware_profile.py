"""The profile of this machine, and what it decides before a request has been measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from decoding import GREEDY, Engine, Settings
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import ASSUMED_CPU, HardwareProfile, Trust
from decoding.planning.plan import Memory, Plan
from decoding.planning.planner import Planner
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements, Strategy
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


def planner_on(machine: HardwareProfile, trust: Trust = Trust.ALL) -> Planner:
    return Planner(requirements_of(), CostModel(machine, trust=trust))


def plans_of(planner: Planner, host: float = 2.0, concurrency: int = 1) -> dict[Strategy, Plan]:
    """Return plans with device memory for 60% of the KV, beside buffers of fixed size."""
    requirements = planner.requirements
    kv = requirements.layout.bytes(PROMPT + NEW)
    fixed = RequestSpec(requirements, PROMPT, NEW).memory
    device = int(0.6 * kv) + fixed.hidden + fixed.forwards + fixed.tables
    return planner.candidates(PROMPT, NEW, Memory(device, int(host * kv), concurrency))


def fastest(machine: HardwareProfile, plans: Mapping[Strategy, Plan]) -> Plan:
    """Return the plan with the fewest seconds per token predicted for a machine."""
    return min(plans.values(), key=CostModel(machine).token_s)


def test_gpus_are_identified_by_their_driver_name() -> None:
    for gpu, ranks, name in [
        ("NVIDIA GeForce RTX 4090", 1, "1x4090"),
        ("NVIDIA GeForce RTX 4090", 2, "2x4090"),
        ("NVIDIA GeForce RTX 4090", 3, "3x4090"),
        ("NVIDIA GeForce RTX 3090", 1, "1x3090"),
        ("NVIDIA GeForce RTX 3090", 2, "2x3090"),
        ("NVIDIA GeForce RTX 5090", 2, "2x5090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 1, "1x4070-Ti-Super"),
        ("NVIDIA L40S", 1, "1xL40S"),
        ("NVIDIA RTX 6000 Ada Generation", 1, "1x6000-Ada"),
        ("NVIDIA A100-SXM4-80GB", 1, "1xA100-80"),
        ("NVIDIA A100 80GB PCIe", 4, "4xA100-80"),
        ("NVIDIA H200 NVL", 2, "2xH200"),
    ]:
        expected = HardwareProfile.from_name(name), Trust.UNSPLIT
        assert HardwareProfile.find(None, gpu, ranks) == expected
    for gpu, ranks in [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 1),
        ("an unknown GPU", 1),
        ("", 1),
    ]:
        profile, trust = HardwareProfile.find(None, gpu, ranks)
        assert trust is Trust.NONE
        assert profile.gpus == ranks
        assert profile.runs_ahead == bool(gpu)
    assert HardwareProfile.find(None, "", 1) == (ASSUMED_CPU, Trust.NONE)


def test_all_reduces_of_more_gpus_take_longer() -> None:
    """A ring of n moves 2 (n - 1) / n of the tensor over each link, shared memory n - 1 tensors."""
    one, two, four = (HardwareProfile.from_name(f"{count}x4090") for count in (1, 2, 4))
    assert (one.gpus, two.gpus, four.gpus) == (1, 2, 4)
    assert one.all_reduce_s == 0.0
    assert four.all_reduce_s == pytest.approx(3 * two.all_reduce_s)
    assert four.all_reduce_rate == pytest.approx(two.all_reduce_rate / 1.5)
    assert one.shared_all_reduce_rate is None
    assert two.shared_all_reduce_rate == two.link_in / 2
    assert four.shared_all_reduce_rate == pytest.approx(two.shared_all_reduce_rate / 3)
    for name in ("0x4090", "1025x4090", "4090", "1x4080", "1x"):
        with pytest.raises(TierForceError, match=f"`hardware` {name} is neither a file nor"):
            HardwareProfile.from_name(name)


def test_a_hardware_file_must_have_the_same_number_of_gpus(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    found = HardwareProfile.find(str(path), "NVIDIA GeForce RTX 4090", 1)
    assert found == (MACHINE, Trust.ALL)
    shipped = HardwareProfile.from_name("1x4090")
    assert HardwareProfile.find("1x4090", "", 1) == (shipped, Trust.UNSPLIT)
    with pytest.raises(TierForceError, match=r"for 1 GPUs, and this run has 2: measure with `tier"):
        HardwareProfile.find(str(path), "", 2)
    with pytest.raises(
        TierForceError, match="`hardware` nowhere is neither a file nor a known machine"
    ):
        HardwareProfile.find("nowhere", "", 1)


def test_split_modes_require_measured_rates() -> None:
    for field in ("reconstruct_rate", "high_bits_rate"):
        assert replace(MACHINE, **{field: None}).trust_in("mine") is Trust.UNSPLIT


@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11])
def test_the_first_request_gets_the_strategy_predicted_fastest(rate: float) -> None:
    machine = replace(MACHINE, link_in=rate)
    planner = planner_on(machine)
    plans = plans_of(planner)
    assert {strategy.mode for strategy in plans} == {WHOLE, SPLIT}
    choice = planner.choose(plans)
    assert choice == fastest(machine, plans)
    assert choice.reason.startswith("by the numbers of mine: ")
    unsplit = {strategy: plan for strategy, plan in plans.items() if strategy.mode == WHOLE}
    assert planner_on(machine, Trust.UNSPLIT).choose(plans) == fastest(machine, unsplit)


def test_the_first_of_several_requests_is_planned_as_one_of_a_batch() -> None:
    """Requests use the link in turn and share each read of the weights."""
    rates = [10.0 ** (step / 20) for step in range(188, 196)]
    strategies = set()
    for rate in rates:
        machine = replace(MACHINE, link_in=rate)
        planner = planner_on(machine)
        for concurrency in (1, 6):
            plans = plans_of(planner, concurrency=concurrency)
            choice = planner.choose(plans)
            assert choice == fastest(machine, plans)
            strategies.add((rate, choice.requirements.strategy))
    assert len(strategies) > len(rates)  # concurrency changes the strategy at some rate


def test_a_slower_link_makes_a_larger_budget_pay() -> None:
    plans = {
        strategy: plan
        for strategy, plan in plans_of(planner_on(MACHINE)).items()
        if strategy.mode == WHOLE
    }
    machines = [replace(MACHINE, link_in=rate) for rate in (1e12, 1e7)]
    budgets = [fastest(each, plans).requirements.strategy.budget for each in machines]
    assert budgets == sorted(set(budgets))


def test_a_shipped_profile_selects_a_split_mode_if_nothing_else_fits() -> None:
    planner = planner_on(MACHINE, Trust.UNSPLIT)
    plans = plans_of(planner, host=0.5)
    assert {strategy.mode for strategy in plans} == {SPLIT}
    assert planner.choose(plans) == fastest(MACHINE, plans)


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
            assert engine.stats.plan is not None
            reasons.append(engine.stats.plan.reason)
    assert "no measurements of these models yet" in reasons[0]
    assert reasons[1].startswith("by the numbers of mine: ")
    two = tmp_path / "two.json"
    two.write_text(json.dumps(asdict(replace(MACHINE, gpus=2))))
    with pytest.raises(TierForceError, match=r"two\.json is for 2 GPUs, and this run has 1"):
        Engine.from_pretrained(DEMO / "target", settings=Settings(hardware=str(two)))
