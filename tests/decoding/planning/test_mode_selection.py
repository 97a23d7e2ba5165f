"""What `auto` stands for, text by text: codes on the device where that is found to pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding import GREEDY
from decoding.app.terminal.messages import startup_line
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET
from decoding.config.settings import Settings
from decoding.planning.fit import Memory, feasible_plans, max_prompt
from decoding.planning.measured_cost import MeasuredCosts
from decoding.planning.memory_requirements import Requirements, Strategy
from decoding.planning.strategy_selector import StrategySelector
from decoding.speculation.draft_length import RoundStats
from offload.dtypes import dtype_spec
from offload.errors import InsufficientMemoryError
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, Pair
from support.planning import case_of
from support.prompts import prompt
from support.ranks import run_ranks

PROMPT, NEW = 20_000, 200
OWN, SPLIT = "retrieval", "split-retrieval"


def needs_of(mode: str = "auto", dtype: str = "bfloat16", **choices: Any) -> Requirements:
    settings = Settings(mode=mode, dtype=dtype, prefill_chunk=256, **choices)
    model = replace(case_of(1).target, layers=24, kv_heads=4)
    resolved = settings.resolved_mode(has_draft=False)
    return Requirements(model, None, resolved, settings, dtype_spec(dtype), 1, 1, copies=True)


def memory_of(needs: Requirements, device: float, host: float = 2.0) -> Memory:
    """Memory for such shares of the KV, beside what there is only once."""
    kv = needs.layout.bytes(PROMPT + NEW)
    fixed = needs.memory(PROMPT, NEW)
    return Memory(int(device * kv) + fixed.hidden + fixed.forwards + fixed.tables, int(host * kv))


def modes(needs: Requirements, memory: Memory, prompt: int = PROMPT) -> set[str]:
    return {way.mode for way in feasible_plans(needs, memory, prompt, NEW)}


def seconds(needs: Requirements, rate: float) -> float:
    """Of all KV over a link."""
    return needs.layout.bytes(PROMPT) / rate


def rounds(drafted: int, accepted: int, draft_s: float, verify_s: float) -> list[RoundStats]:
    return [RoundStats(drafted, accepted, drafted + 1, draft_s * drafted, verify_s)] * 40


def test_slices_are_an_option_where_nothing_is_set_and_layers_wait_on_the_host() -> None:
    needs = needs_of()
    assert modes(needs, memory_of(needs, 0.6)) == {OWN, SPLIT}
    assert modes(needs_of(OWN), memory_of(needs, 0.6)) == {OWN}
    assert modes(needs_of(dtype="float32"), memory_of(needs, 3)) == {OWN}
    # all KV fits the device
    assert modes(needs, memory_of(needs, 4)) == {OWN}
    assert modes(needs, memory_of(needs, 0.6), prompt=1000) == {OWN}


def test_a_host_too_small_for_whole_elements_takes_slices() -> None:
    needs = needs_of()
    small = memory_of(needs, 0.45, host=0.6)
    assert modes(needs, small) == {SPLIT}
    plans = feasible_plans(needs, small, PROMPT, NEW)
    choice = StrategySelector(MeasuredCosts(1e9)).select(needs, plans, PROMPT)
    assert choice.strategy.mode == SPLIT
    assert f"{OWN} does not fit" in choice.why
    with pytest.raises(InsufficientMemoryError, match="host memory"):
        feasible_plans(needs_of(OWN), small, PROMPT, NEW)
    # where neither does, what is said to be needed is the least
    with pytest.raises(InsufficientMemoryError, match="host memory") as least:
        feasible_plans(needs, memory_of(needs, 0.45, host=0.1), PROMPT, NEW)
    for mode in (OWN, SPLIT):
        way = needs.with_strategy(Strategy(mode, 4096))
        with pytest.raises(InsufficientMemoryError) as more:
            feasible_plans(way, memory_of(needs, 0.45, host=0.1), PROMPT, NEW)
        assert more.value.host_bytes >= least.value.host_bytes > 0
    # and a text as long is what is said to fit
    fits = max_prompt(needs, small, 2 * PROMPT, NEW)
    assert fits > max(PROMPT, max_prompt(needs_of(OWN), small, 2 * PROMPT, NEW))


@pytest.mark.parametrize(
    ("accepted", "rate", "draft_s", "mode"),
    [
        (6, 1e8, 1e-4, SPLIT),  # little stands behind a slow link
        (6, 1e8, 1.0, OWN),  # drafting is the cost, and codes are read for it
    ],
)
def test_the_first_text_goes_without_and_its_rounds_decide(
    accepted: int, rate: float, draft_s: float, mode: str
) -> None:
    needs = needs_of()
    chooser = StrategySelector(MeasuredCosts(rate))
    plans = feasible_plans(needs, memory_of(needs, 0.6), PROMPT, NEW)
    first = chooser.select(needs, plans, PROMPT)
    assert first.strategy == Strategy(OWN, DEFAULT_RETRIEVAL_BUDGET)
    assert "nothing is known" in first.why
    plan = plans[first.strategy]
    link_s = seconds(needs, rate) * (1 - plan.resident_layers / needs.target.layers)
    past = rounds(24, accepted, draft_s, max(link_s, 0.01))
    chooser.record(needs.with_strategy(first.strategy), plan, PROMPT, past)
    second = chooser.select(needs, plans, PROMPT)
    assert second.strategy.mode == mode
    assert f"with mode {OWN if mode == SPLIT else SPLIT}, budget" in second.why


@pytest.mark.parametrize(
    ("draft_s", "times_link"),
    [(0.5, 1.0), (1e-3, 6.0)],
    ids=["drafting", "verifying"],
)
def test_slices_that_disappoint_are_given_up(draft_s: float, times_link: float) -> None:
    needs, rate = needs_of(), 1e8
    chooser = StrategySelector(MeasuredCosts(rate))
    plans = feasible_plans(needs, memory_of(needs, 0.6), PROMPT, NEW)
    link_s = seconds(needs, rate)
    usual = Strategy(OWN, DEFAULT_RETRIEVAL_BUDGET)
    chooser.record(needs.with_strategy(usual), plans[usual], PROMPT, rounds(24, 6, 1e-3, link_s))
    tried = chooser.select(needs, plans, PROMPT).strategy
    assert tried.mode == SPLIT
    # as many stand as before, and they take longer than it was thought
    for _ in range(3):
        past = rounds(24, 6, draft_s, times_link * link_s)
        chooser.record(needs.with_strategy(tried), plans[tried], PROMPT, past)
    assert chooser.select(needs, plans, PROMPT).strategy.mode == OWN


def test_a_length_below_that_is_set_is_reckoned_with() -> None:
    """A draft of 64 before every pass over codes costs more than the best one."""
    costs = []
    for inner in (None, 64):
        needs = needs_of(num_inner_draft_tokens=inner)
        plans = feasible_plans(needs, memory_of(needs, 0.6), PROMPT, NEW)
        observed, way = MeasuredCosts(1e8), Strategy(OWN, DEFAULT_RETRIEVAL_BUDGET)
        observed.record(needs.with_strategy(way), plans[way], PROMPT, rounds(24, 6, 1e-2, 1.0))
        split = Strategy(SPLIT, DEFAULT_RETRIEVAL_BUDGET)
        cost = observed.round_cost(needs.with_strategy(split), plans[split], PROMPT)
        assert cost is not None
        costs.append(cost.drafted_s)
    assert costs[1] > 2 * costs[0]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft", dtype="bfloat16")


# settings with which the link is the cost: what crosses it decides
SLOW: dict[str, Any] = {
    "link": "emulated:0.03",
    "gpu_kv_layers": 1,
    "retrieval_budget": 512,
    "num_draft_tokens": 5,
}
DOCUMENT = (3 * prompt("argparse"))[:1200]


def test_an_engine_goes_over_to_slices(pair: Pair) -> None:
    seen = []
    with pair.engine("auto", **SLOW) as engine:
        place = engine.plan(len(DOCUMENT), 48)
        assert ", hierarchical or split-hierarchical, " in startup_line(
            engine, len(DOCUMENT), place
        )
        for _ in range(2):
            assert len(list(engine.generate(DOCUMENT, 48, GREEDY))) == 48
            seen.append(engine.stats.as_dict())
    assert [each["mode"] for each in seen] == ["hierarchical", "split-hierarchical"]
    assert [each["split_kv_layers"] for each in seen] == [0, 5]
    assert "with mode hierarchical, budget 512" in seen[1]["strategy_reason"]
    assert 4 * seen[1]["traffic"]["target"]["link_in"] < seen[0]["traffic"]["target"]["link_in"]


def auto_on_two_ranks(folder: Path) -> None:
    pair = Pair(
        DEMO / "target", DEMO / "draft", TensorParallelGroup.from_environment("cpu"), "bfloat16"
    )
    with pair.engine("auto", **SLOW) as engine:
        if pair.group.rank:
            engine.run_worker()
            return
        for mode in ("hierarchical", "split-hierarchical"):
            assert len(list(engine.generate(DOCUMENT, 48, GREEDY))) == 48
            assert engine.stats.mode == mode
        engine.close()
    (folder / "done").touch()


@pytest.mark.slow
def test_two_ranks_go_over_together(tmp_path: Path) -> None:
    run_ranks(2, auto_on_two_ranks, tmp_path)
    assert (tmp_path / "done").exists()
