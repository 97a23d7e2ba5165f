"""The first text goes by what is known of the machine; later ones by what past texts showed."""

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
OWN, SPLIT = "retrieval", "split-retrieval"
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
    1e-5,
    reconstruct_rate=2e9,
    high_bits_rate=5e9,
)


def needs_of() -> Requirements:
    settings = Settings(mode="auto", dtype="bfloat16", prefill_chunk=256)
    model = replace(case_of(1).target, layers=24, kv_heads=4)
    return Requirements(model, None, OWN, settings, dtype_spec("bfloat16"), 1, 1, copies=True)


def plans_of(needs: Requirements, host: float = 2.0) -> dict[Strategy, MemoryPlan]:
    """In memory for six tenths of the KV, beside what there is only once."""
    kv, fixed = needs.layout.bytes(PROMPT + NEW), needs.memory(PROMPT, NEW)
    device = int(0.6 * kv) + fixed.hidden + fixed.forwards + fixed.tables
    return feasible_plans(needs, Memory(device, int(host * kv)), PROMPT, NEW)


def best(
    needs: Requirements,
    plans: Mapping[Strategy, MemoryPlan],
    machine: HardwareProfile,
    texts: int = 1,
) -> Strategy:
    """The way of these with the fewest seconds a token by a machine's numbers."""
    costs = PredictedCosts(machine, Acceptance(), texts)

    def seconds(way: Strategy) -> float:
        cost = costs.round_cost(needs.with_strategy(way), plans[way], PROMPT)
        return cost.best_length(needs.draft_lengths)[1]

    return min(plans, key=seconds)


def test_gpus_are_known_by_the_name_that_the_driver_gives_them() -> None:
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
        ("a stand-in", 1),
        ("", 1),
    ]:
        assert find_prior(None, gpu, ranks) is None


def test_a_file_is_of_this_machine_and_of_as_many_gpus(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    prior = find_prior(str(path), "NVIDIA GeForce RTX 4090", 1)
    assert prior == HardwarePrior(MACHINE, is_measured=True)
    assert find_prior("1x4090", "", 1) == HardwarePrior(
        HardwareProfile.from_name("1x4090"), is_measured=False
    )
    with pytest.raises(TierForceError, match=r"of 1 GPUs, and this run has 2: measure with `tier"):
        find_prior(str(path), "", 2)
    with pytest.raises(TierForceError, match="`hardware` nowhere: there is no such file"):
        find_prior("nowhere", "", 1)


def test_the_link_is_as_fast_as_it_was_measured() -> None:
    prior = HardwarePrior(MACHINE, is_measured=True)
    assert prior.with_link(5e8).machine == replace(MACHINE, link_in=5e8)
    assert prior.with_link(None) == prior


@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11])
def test_the_first_text_takes_what_the_machines_numbers_promise(rate: float) -> None:
    needs, machine = needs_of(), replace(MACHINE, link_in=rate)
    plans = plans_of(needs)
    assert {way.mode for way in plans} == {OWN, SPLIT}
    costs = MeasuredCosts(rate)
    choice = StrategySelector(costs, HardwarePrior(machine, is_measured=True)).select(
        needs, plans, PROMPT
    )
    assert choice.strategy == best(needs, plans, machine)
    assert choice.why.startswith("by numbers of mine: ")
    # slices must have been measured, on this machine
    own = {way: plan for way, plan in plans.items() if way.mode == OWN}
    for prior in (
        HardwarePrior(machine, is_measured=False),
        HardwarePrior(replace(machine, reconstruct_rate=None), is_measured=True),
        HardwarePrior(replace(machine, high_bits_rate=None), is_measured=True),
    ):
        choice = StrategySelector(costs, prior).select(needs, plans, PROMPT)
        assert choice.strategy == best(needs, own, prior.machine)


def test_the_first_of_several_texts_is_chosen_for_as_one_of_them() -> None:
    """The link is theirs in turn, and weights are read once for all."""
    needs = needs_of()
    plans = plans_of(needs)
    rates = [10.0 ** (step / 2) for step in range(14, 20)]
    found = set()
    for rate in rates:
        machine = replace(MACHINE, link_in=rate)
        chooser = StrategySelector(MeasuredCosts(rate), HardwarePrior(machine, is_measured=True))
        for texts in (1, 6):
            choice = chooser.select(needs, plans, PROMPT, texts)
            assert choice.strategy == best(needs, plans, machine, texts)
            found.add((rate, choice.strategy))
    assert len(found) > len(rates)  # six at once are not always chosen for as one is


def test_the_link_decides_how_large_a_budget_pays() -> None:
    needs = needs_of()
    plans = {way: plan for way, plan in plans_of(needs).items() if way.mode == OWN}
    budgets = [best(needs, plans, replace(MACHINE, link_in=rate)).budget for rate in (1e12, 1e7)]
    assert budgets == sorted(set(budgets))


def test_numbers_that_were_not_measured_choose_slices_where_nothing_else_fits() -> None:
    needs = needs_of()
    plans = plans_of(needs, host=0.5)
    assert {way.mode for way in plans} == {SPLIT}
    chooser = StrategySelector(MeasuredCosts(1e9), HardwarePrior(MACHINE, is_measured=False))
    assert chooser.select(needs, plans, PROMPT).strategy == best(needs, plans, MACHINE)


def test_what_a_text_showed_counts_for_more_than_any_numbers() -> None:
    needs = needs_of()
    plans = plans_of(needs)
    wrong = replace(MACHINE, memory_rate=1e6, matmul=1e7)
    with_prior = StrategySelector(MeasuredCosts(1e8), HardwarePrior(wrong, is_measured=True))
    without = StrategySelector(MeasuredCosts(1e8))
    way = Strategy(OWN, DEFAULT_RETRIEVAL_BUDGET)
    past = [RoundStats(24, 8, 25, 24e-3, 0.5)] * 40
    for chooser in (with_prior, without):
        chooser.record(needs.with_strategy(way), plans[way], PROMPT, past)
    assert with_prior.select(needs, plans, PROMPT) == without.select(needs, plans, PROMPT)


def test_an_engine_goes_by_the_file_that_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    text = (3 * prompt("argparse"))[:1500]
    whys = []
    for hardware in (None, str(path)):
        settings = Settings(
            hardware=hardware, dtype="bfloat16", link="emulated:50", gpu_kv_layers=0
        )
        with closing(Engine.from_pretrained(DEMO / "target", settings=settings)) as engine:
            list(engine.generate(text, 6, GREEDY))
            assert engine.stats.strategy is not None
            whys.append(engine.stats.strategy.why)
    assert "nothing is known of these models yet" in whys[0]
    assert whys[1].startswith("by numbers of mine: ")
    two = tmp_path / "two.json"
    two.write_text(json.dumps(asdict(replace(MACHINE, gpus=2))))
    with pytest.raises(TierForceError, match=r"two\.json is of 2 GPUs, and this run has 1"):
        Engine.from_pretrained(DEMO / "target", settings=Settings(hardware=str(two)))
