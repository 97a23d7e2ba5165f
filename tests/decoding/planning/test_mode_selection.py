"""What `auto` stands for, text by text: codes on the device where that is found to pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding import GREEDY
from decoding.app.terminal.messages import opening
from decoding.config.defaults import DEFAULT_BUDGET
from decoding.config.settings import Settings
from decoding.planning.fit import Memory, affordable, longest_prompt
from decoding.planning.measured_cost import ObservedCosts
from decoding.planning.memory_requirements import TextNeeds, Way
from decoding.planning.strategy_selector import WayChooser
from decoding.speculation.draft_length import RoundStats
from offload.dtypes import counted_dtype
from offload.errors import FitError
from parallel.ranks.process_group import Group
from support.engines import DEMO, Pair
from support.planning import case_of
from support.ranks import run_ranks
from support.texts import prompt

PROMPT, NEW = 20_000, 200
OWN, SLICED = "retrieval", "sliced-retrieval"


def needs_of(mode: str = "auto", dtype: str = "bfloat16", **choices: Any) -> TextNeeds:
    settings = Settings(mode=mode, dtype=dtype, prefill_chunk=256, **choices)
    model = replace(case_of(1).target, layers=24, kv_heads=4)
    resolved = settings.resolved_mode(has_draft=False)
    return TextNeeds(model, None, resolved, settings, counted_dtype(dtype), 1, 1, copies=True)


def memory_of(needs: TextNeeds, device: float, host: float = 2.0) -> Memory:
    """Memory for such shares of the KV, beside what there is only once."""
    kv = needs.layout.bytes(PROMPT + NEW)
    fixed = needs.memory(PROMPT, NEW)
    return Memory(int(device * kv) + fixed.hidden + fixed.passes + fixed.tables, int(host * kv))


def modes(needs: TextNeeds, memory: Memory, prompt: int = PROMPT) -> set[str]:
    return {way.mode for way in affordable(needs, memory, prompt, NEW)}


def seconds(needs: TextNeeds, rate: float) -> float:
    """Of all KV over a link."""
    return needs.layout.bytes(PROMPT) / rate


def rounds(drafted: int, accepted: int, draft_s: float, verify_s: float) -> list[RoundStats]:
    return [RoundStats(drafted, accepted, drafted + 1, draft_s * drafted, verify_s)] * 40


def test_slices_are_an_option_where_nothing_is_set_and_layers_wait_on_the_host() -> None:
    needs = needs_of()
    assert modes(needs, memory_of(needs, 0.6)) == {OWN, SLICED}
    assert modes(needs_of(OWN), memory_of(needs, 0.6)) == {OWN}
    assert modes(needs_of(dtype="float32"), memory_of(needs, 3)) == {OWN}
    # all KV fits the device
    assert modes(needs, memory_of(needs, 4)) == {OWN}
    assert modes(needs, memory_of(needs, 0.6), prompt=1000) == {OWN}


def test_a_host_too_small_for_whole_elements_takes_slices() -> None:
    needs = needs_of()
    small = memory_of(needs, 0.45, host=0.6)
    assert modes(needs, small) == {SLICED}
    plans = affordable(needs, small, PROMPT, NEW)
    choice = WayChooser(ObservedCosts(1e9)).choose(needs, plans, PROMPT)
    assert choice.way.mode == SLICED
    assert f"{OWN} does not fit" in choice.why
    with pytest.raises(FitError, match="host memory"):
        affordable(needs_of(OWN), small, PROMPT, NEW)
    # where neither does, what is said to be needed is the least
    with pytest.raises(FitError, match="host memory") as least:
        affordable(needs, memory_of(needs, 0.45, host=0.1), PROMPT, NEW)
    for mode in (OWN, SLICED):
        way = needs.with_way(Way(mode, 4096))
        with pytest.raises(FitError) as more:
            affordable(way, memory_of(needs, 0.45, host=0.1), PROMPT, NEW)
        assert more.value.host_bytes >= least.value.host_bytes > 0
    # and a text as long is what is said to fit
    fits = longest_prompt(needs, small, 2 * PROMPT, NEW)
    assert fits > max(PROMPT, longest_prompt(needs_of(OWN), small, 2 * PROMPT, NEW))


@pytest.mark.parametrize(
    ("accepted", "rate", "draft_s", "mode"),
    [
        (6, 1e8, 1e-4, SLICED),  # little stands behind a slow link
        (6, 1e8, 1.0, OWN),  # drafting is the cost, and codes are read for it
    ],
)
def test_the_first_text_goes_without_and_its_rounds_decide(
    accepted: int, rate: float, draft_s: float, mode: str
) -> None:
    needs = needs_of()
    chooser = WayChooser(ObservedCosts(rate))
    plans = affordable(needs, memory_of(needs, 0.6), PROMPT, NEW)
    first = chooser.choose(needs, plans, PROMPT)
    assert first.way == Way(OWN, DEFAULT_BUDGET)
    assert "nothing is known" in first.why
    plan = plans[first.way]
    link_s = seconds(needs, rate) * (1 - plan.resident_layers / needs.target.layers)
    past = rounds(24, accepted, draft_s, max(link_s, 0.01))
    chooser.record(needs.with_way(first.way), plan, PROMPT, past)
    second = chooser.choose(needs, plans, PROMPT)
    assert second.way.mode == mode
    assert f"with mode {OWN if mode == SLICED else SLICED}, budget" in second.why


@pytest.mark.parametrize(
    ("draft_s", "times_link"),
    [(0.5, 1.0), (1e-3, 6.0)],
    ids=["drafting", "verifying"],
)
def test_slices_that_disappoint_are_given_up(draft_s: float, times_link: float) -> None:
    needs, rate = needs_of(), 1e8
    chooser = WayChooser(ObservedCosts(rate))
    plans = affordable(needs, memory_of(needs, 0.6), PROMPT, NEW)
    link_s = seconds(needs, rate)
    usual = Way(OWN, DEFAULT_BUDGET)
    chooser.record(needs.with_way(usual), plans[usual], PROMPT, rounds(24, 6, 1e-3, link_s))
    tried = chooser.choose(needs, plans, PROMPT).way
    assert tried.mode == SLICED
    # as many stand as before, and they take longer than it was thought
    for _ in range(3):
        past = rounds(24, 6, draft_s, times_link * link_s)
        chooser.record(needs.with_way(tried), plans[tried], PROMPT, past)
    assert chooser.choose(needs, plans, PROMPT).way.mode == OWN


def test_a_length_below_that_is_set_is_reckoned_with() -> None:
    """A draft of 64 before every pass over codes costs more than the best one."""
    costs = []
    for inner in (None, 64):
        needs = needs_of(inner_length=inner)
        plans = affordable(needs, memory_of(needs, 0.6), PROMPT, NEW)
        observed, way = ObservedCosts(1e8), Way(OWN, DEFAULT_BUDGET)
        observed.record(needs.with_way(way), plans[way], PROMPT, rounds(24, 6, 1e-2, 1.0))
        sliced = Way(SLICED, DEFAULT_BUDGET)
        cost = observed.round_cost(needs.with_way(sliced), plans[sliced], PROMPT)
        assert cost is not None
        costs.append(cost.drafted_s)
    assert costs[1] > 2 * costs[0]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft", dtype="bfloat16")


# settings with which the link is the cost: what crosses it decides
SLOW: dict[str, Any] = {
    "link": "emulated:0.03",
    "resident_layers": 1,
    "budget": 512,
    "draft_length": 5,
}
DOCUMENT = (3 * prompt("argparse"))[:1200]


def test_an_engine_goes_over_to_slices(pair: Pair) -> None:
    seen = []
    with pair.engine("auto", **SLOW) as engine:
        place = engine.check(len(DOCUMENT), 48)
        assert ", hierarchical or sliced-hierarchical, " in opening(engine, len(DOCUMENT), place)
        for _ in range(2):
            assert len(list(engine.generate(DOCUMENT, 48, GREEDY))) == 48
            seen.append(engine.stats.as_dict())
    assert [each["mode"] for each in seen] == ["hierarchical", "sliced-hierarchical"]
    assert [each["sliced_layers"] for each in seen] == [0, 5]
    assert "with mode hierarchical, budget 512" in seen[1]["budget_because"]
    assert 4 * seen[1]["traffic"]["target"]["link_in"] < seen[0]["traffic"]["target"]["link_in"]


def auto_on_two_ranks(folder: Path) -> None:
    pair = Pair(DEMO / "target", DEMO / "draft", Group.from_environment("cpu"), "bfloat16")
    with pair.engine("auto", **SLOW) as engine:
        if pair.group.rank:
            engine.follow()
            return
        for mode in ("hierarchical", "sliced-hierarchical"):
            assert len(list(engine.generate(DOCUMENT, 48, GREEDY))) == 48
            assert engine.stats.mode == mode
        engine.close()
    (folder / "done").touch()


@pytest.mark.slow
def test_two_ranks_go_over_together(tmp_path: Path) -> None:
    run_ranks(2, auto_on_two_ranks, tmp_path)
    assert (tmp_path / "done").exists()
