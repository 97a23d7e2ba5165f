"""Mode `auto` per request: split layers where measurements show that they pay."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import decoding.config.settings
from decoding import GREEDY
from decoding.app.terminal.messages import startup_line
from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET, MAX_DRAFT, MAX_SPLIT_DRAFT
from decoding.config.settings import Settings
from decoding.engine.engine import Engine
from decoding.planning import planner as planners
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.plan import Memory, Plan
from decoding.planning.planner import Planner
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import (
    Requirements,
    Strategy,
    candidate_split_budgets,
    largest_forward,
)
from decoding.planning.round_cost import rejection_ratio
from decoding.speculation.draft_length import RoundStats
from offload.dtypes import dtype_spec
from offload.errors import InsufficientMemoryError
from parallel.config.model_config import ModelConfig
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO, Pair
from support.planning import case_of
from support.prompts import prompt
from support.ranks import run_ranks

PROMPT, NEW = 20_000, 200
WHOLE, SPLIT = "retrieval", "split-retrieval"


def requirements_of(mode: str = "auto", dtype: str = "bfloat16", **choices: Any) -> Requirements:
    model = replace(case_of(1).target, layers=24, kv_heads=4)
    return requirements_for(model, mode, dtype, **choices)


def requirements_for(
    model: ModelConfig, mode: str = "auto", dtype: str = "bfloat16", **choices: Any
) -> Requirements:
    settings = Settings(mode=mode, dtype=dtype, prefill_chunk=256, **choices)
    resolved = settings.resolved_mode(has_draft=False, full_layers=model.full_layers)
    return Requirements(model, None, resolved, settings, dtype_spec(dtype), 1, 1, copies=True)


def memory_of(requirements: Requirements, device: float, host: float = 2.0) -> Memory:
    """Return memory for these shares of the KV, beside buffers of fixed size."""
    kv = requirements.layout.bytes(PROMPT + NEW)
    fixed = RequestSpec(requirements, PROMPT, NEW).memory
    return Memory(int(device * kv) + fixed.hidden + fixed.forwards + fixed.tables, int(host * kv))


def planner_of(requirements: Requirements, rate: float = 1e8) -> Planner:
    """Return a planner of an unknown CPU without history; `rate` is the link's in bytes/s."""
    profile, trust = HardwareProfile.find(None, "", 1)
    return Planner(requirements, CostModel(replace(profile, link_in=rate), trust=trust))


def plans_of(
    requirements: Requirements, memory: Memory, prompt: int = PROMPT
) -> dict[Strategy, Plan]:
    return planner_of(requirements).candidates(prompt, NEW, memory)


def modes(requirements: Requirements, memory: Memory, prompt: int = PROMPT) -> set[str]:
    return {strategy.mode for strategy in plans_of(requirements, memory, prompt)}


def longest_prompt(requirements: Requirements, memory: Memory) -> int:
    return planner_of(requirements).longest_prompt(2 * PROMPT, NEW, memory)


def rounds(drafted: int, accepted: int, draft_s: float, verify_s: float) -> list[RoundStats]:
    return [RoundStats(drafted, accepted, drafted + 1, draft_s * drafted, verify_s)] * 40


def test_auto_considers_split_modes_if_layers_are_offloaded() -> None:
    requirements = requirements_of()
    assert modes(requirements, memory_of(requirements, 0.6)) == {WHOLE, SPLIT}
    assert modes(requirements_of(WHOLE), memory_of(requirements, 0.6)) == {WHOLE}
    assert modes(requirements_of(dtype="float32"), memory_of(requirements, 3)) == {WHOLE}
    # All KV fits the device.
    assert modes(requirements, memory_of(requirements, 4)) == {WHOLE}
    assert modes(requirements, memory_of(requirements, 0.6), prompt=1000) == {WHOLE}


@pytest.mark.parametrize("longest", [MAX_SPLIT_DRAFT, 256])
def test_plans_of_split_modes_alone_have_room_for_longer_drafts(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.config.settings, "MAX_SPLIT_DRAFT", longest)
    requirements = requirements_of()
    plans = plans_of(requirements, memory_of(requirements, 0.6))
    specs = {strategy.mode: plan.spec for strategy, plan in plans.items()}
    rows = {mode: spec.requirements.max_forward_tokens for mode, spec in specs.items()}
    assert rows == {WHOLE: MAX_DRAFT + 2, SPLIT: longest + 2}
    assert {mode: spec.target.forward_rows for mode, spec in specs.items()} == rows
    assert {mode: spec.target.rows for mode, spec in specs.items()} == {
        WHOLE: rows[WHOLE],
        SPLIT: 2 * rows[SPLIT],
    }
    # messages have room for those of any request
    assert largest_forward(requirements) == longest + 2
    for other in (requirements_of(WHOLE), requirements_of(dtype="float32")):
        assert largest_forward(other) == MAX_DRAFT + 2
    fixed = requirements_of(num_draft_tokens=9, num_inner_draft_tokens=40)
    assert largest_forward(fixed) == fixed.max_forward_tokens == 42


def test_auto_has_no_retrieval_cache_if_all_layers_have_a_window(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO / "target", tmp_path / "target"))
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "mistral", "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_pretrained(folder)
    assert requirements_for(config).candidate_modes == ["plain"]
    assert Settings().resolved_mode(has_draft=True, full_layers=0) == "speculative"
    assert requirements_for(config, WHOLE).candidate_modes == [WHOLE]
    assert requirements_of().candidate_modes == [WHOLE, SPLIT]
    settings = Settings(link="emulated:50")
    with closing(Engine.from_pretrained(folder, settings=settings, device="cpu")) as engine:
        assert engine.runtime.mode == "plain"
        assert engine.runtime.with_settings(settings).mode == "plain"
        assert len(list(engine.generate([5, 6, 7], 4, GREEDY))) == 4


def test_a_host_too_small_for_whole_elements_gets_a_split_mode() -> None:
    requirements = requirements_of()
    small = memory_of(requirements, 0.45, host=0.6)
    assert modes(requirements, small) == {SPLIT}
    choice = planner_of(requirements).choose(plans_of(requirements, small))
    assert choice.requirements.mode == SPLIT
    assert f"{WHOLE} does not fit" in choice.reason
    with pytest.raises(InsufficientMemoryError, match="host memory"):
        plans_of(requirements_of(WHOLE), small)
    # If neither fits, the error states the smaller requirement.
    with pytest.raises(InsufficientMemoryError, match="host memory") as smallest:
        plans_of(requirements, memory_of(requirements, 0.45, host=0.1))
    for mode in (WHOLE, SPLIT):
        fixed = requirements.with_strategy(Strategy(mode, 4096))
        with pytest.raises(InsufficientMemoryError) as other:
            plans_of(fixed, memory_of(requirements, 0.45, host=0.1))
        assert other.value.host_bytes >= smallest.value.host_bytes > 0
    # The longest prompt is that of the split mode.
    longest = longest_prompt(requirements, small)
    assert longest > max(PROMPT, longest_prompt(requirements_of(WHOLE), small))


@pytest.mark.parametrize(
    ("accepted", "rate", "draft_s", "mode"),
    [
        (6, 1e8, 1e-4, SPLIT),  # low acceptance over a slow link
        (6, 1e8, 1.0, WHOLE),  # drafting dominates, and it reads the high bytes
    ],
)
def test_the_first_request_is_unsplit_and_its_rounds_decide(
    accepted: int, rate: float, draft_s: float, mode: str
) -> None:
    requirements = requirements_of()
    planner = planner_of(requirements, rate)
    plans = plans_of(requirements, memory_of(requirements, 0.6))
    first = planner.choose(plans)
    assert first.requirements.strategy == Strategy(WHOLE, DEFAULT_RETRIEVAL_BUDGET)
    assert "no measurements" in first.reason
    planner.record(first, rounds(24, accepted, draft_s, max(first.link_bytes / rate, 0.01)))
    second = planner.choose(plans)
    assert second.requirements.mode == mode
    assert f"with mode {WHOLE if mode == SPLIT else SPLIT}, budget" in second.reason


@pytest.mark.parametrize(
    ("draft_s", "times_link"),
    [(0.5, 1.0), (1e-3, 6.0)],
    ids=["drafting", "verifying"],
)
def test_a_slow_split_mode_is_abandoned(draft_s: float, times_link: float) -> None:
    requirements, rate = requirements_of(), 1e8
    planner = planner_of(requirements, rate)
    plans = plans_of(requirements, memory_of(requirements, 0.6))
    default = Strategy(WHOLE, DEFAULT_RETRIEVAL_BUDGET)
    link_s = plans[default].link_bytes / rate
    planner.record(plans[default], rounds(24, 6, 1e-3, link_s))
    tried = planner.choose(plans)
    assert tried.requirements.mode == SPLIT
    # Acceptance is unchanged, and the rounds take longer than predicted.
    for _ in range(3):
        planner.record(tried, rounds(24, 6, draft_s, times_link * link_s))
    assert planner.choose(plans).requirements.mode == WHOLE


def test_a_configured_inner_draft_length_is_considered() -> None:
    """64 draft tokens per forward over high bytes cost more than the best number."""
    costs = []
    for inner in (None, 64):
        requirements = requirements_of(num_inner_draft_tokens=inner)
        planner = planner_of(requirements)
        plans = plans_of(requirements, memory_of(requirements, 0.6))
        whole, split = (plans[Strategy(mode, DEFAULT_RETRIEVAL_BUDGET)] for mode in (WHOLE, SPLIT))
        planner.record(whole, rounds(24, 6, 1e-2, 1.0))
        costs.append(planner.costs.round_cost(split).drafted_s)
    assert costs[1] > 2 * costs[0]


def split_budgets(requirements: Requirements, device: float = 0.9) -> set[int]:
    """Return the selected keys per head of split layers, over all plans of a request."""
    plans = plans_of(requirements, memory_of(requirements, device))
    return {strategy.split_budget for strategy in plans}


def test_split_layers_have_a_budget_of_keys() -> None:
    assert split_budgets(requirements_of("split")) == {0, 4096, 8192}
    assert split_budgets(requirements_of("split", split_budget=512)) == {512}
    assert split_budgets(requirements_of(WHOLE)) == {0}
    auto = requirements_of()
    plans = plans_of(auto, memory_of(auto, 0.6))
    assert {key.split_budget for key in plans if key.mode == SPLIT} == {0, 4096, 8192}
    assert {key.split_budget for key in plans if key.mode == WHOLE} == {0}
    # a short prompt's KV is small
    assert candidate_split_budgets(requirements_of("split"), 800) == [0]
    assert candidate_split_budgets(requirements_of("split"), 2_000_000)[1:] == [524_288, 1_048_576]
    # without split layers all are the same
    assert split_budgets(requirements_of("split"), 4) == {0}


def test_selected_keys_take_their_place() -> None:
    requirements = requirements_of("split", retrieval_budget=512, split_kv_layers=24)
    plans = plans_of(requirements, memory_of(requirements, 0.9))
    layout = requirements.layout
    some, more = (plans[Strategy("split", 512, budget)] for budget in (4096, 8192))
    keys = 24 * layout.bytes(4096, 1) / 8
    assert keys < more.memory.device_bytes - some.memory.device_bytes < 2 * keys


@pytest.mark.parametrize("device", [0.55, 0.6, 0.65, 0.7, 0.8])
def test_the_first_budget_of_keys_takes_the_place_of_no_layer_that_matters_more(
    device: float,
) -> None:
    requirements = requirements_of("split", retrieval_budget=4096)
    planner = planner_of(requirements)
    plans = plans_of(requirements, memory_of(requirements, device))
    first = planner.choose(plans)
    assert rejection_ratio(first) == min(map(rejection_ratio, plans.values()))


@pytest.mark.parametrize(("accepted", "expected"), [(24, 0), (12, 8192)])
def test_rejections_decide_the_budget_of_split_layers(accepted: int, expected: int) -> None:
    requirements = requirements_of("split", split_kv_layers=24)
    planner = planner_of(requirements)
    plans = plans_of(requirements, memory_of(requirements, 0.9))
    without = plans[Strategy("split", DEFAULT_RETRIEVAL_BUDGET, 0)]
    planner.record(without, rounds(24, accepted, 0.02, 1.0))
    assert planner.choose(plans).requirements.strategy.split_budget == expected


@pytest.mark.parametrize(("used", "expected"), [(0, 0), (2048, 4096), (65_536, 8192)])
def test_a_strategy_in_use_goes_on_with_another_context(used: int, expected: int) -> None:
    """Budgets of split layers grow with the context: the nearest one is the one in use."""
    requirements = requirements_of("split", split_kv_layers=24, retrieval_budget=4096)
    plans = plans_of(requirements, memory_of(requirements, 0.9))
    closest = planners._closest(plans, Strategy("split", 4096, used))
    assert closest == Strategy("split", 4096, expected)


def test_each_budget_of_split_layers_has_its_own_times() -> None:
    requirements = requirements_of("split", split_kv_layers=24, retrieval_budget=4096)
    planner = planner_of(requirements)
    plans = plans_of(requirements, memory_of(requirements, 0.9))
    without, selected = (plans[Strategy("split", 4096, budget)] for budget in (0, 8192))
    planner.record(without, rounds(24, 20, 0.01, 1.0))
    planner.record(selected, rounds(24, 20, 0.1, 1.0))
    calibration = planner.costs.calibration
    assert calibration.drafting(selected) > 5 * calibration.drafting(without)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(DEMO / "target", DEMO / "draft", dtype="bfloat16")


# link-bound settings
SLOW: dict[str, Any] = {
    "link": "emulated:0.03",
    "gpu_kv_layers": 1,
    "retrieval_budget": 512,
    "num_draft_tokens": 5,
}
DOCUMENT = (3 * prompt("argparse"))[:1200]


def test_engine_switches_to_a_split_mode(pair: Pair) -> None:
    stats = []
    with pair.engine("auto", **SLOW) as engine:
        plan = engine.plan(len(DOCUMENT), 48)
        assert ", hierarchical or split-hierarchical, " in startup_line(engine, len(DOCUMENT), plan)
        for _ in range(2):
            assert len(list(engine.generate(DOCUMENT, 48, GREEDY))) == 48
            stats.append(engine.stats.as_dict())
    assert [record["mode"] for record in stats] == ["hierarchical", "split-hierarchical"]
    assert [record["split_kv_layers"] for record in stats] == [0, 5]
    assert "with mode hierarchical, budget 512" in stats[1]["strategy_reason"]
    assert 4 * stats[1]["traffic"]["target"]["link_in"] < stats[0]["traffic"]["target"]["link_in"]


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
def test_two_ranks_switch_mode_together(tmp_path: Path) -> None:
    run_ranks(2, auto_on_two_ranks, tmp_path)
    assert (tmp_path / "done").exists()
