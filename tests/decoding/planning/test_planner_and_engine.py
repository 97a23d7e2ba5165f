"""`tierforce plan` and the engine use one planner: the same numbers give the same decisions."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import decoding.models.runtime
import decoding.planning.requirements
from decoding import Engine
from decoding.models.runtime import Runtime
from decoding.planning.cost_model import CostModel
from decoding.planning.plan import Memory, Plan
from decoding.planning.planner import Planner
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Strategy
from decoding.speculation.draft_length import Adaptive, RoundStats
from offload.dtypes import dtype_of
from offload.errors import InsufficientMemoryError
from offload.memory.cpu_link import ZeroCopyLink
from offload.memory.host_arena import HostArena
from parallel.ranks.process_group import TensorParallelGroup
from support.planning import Case, case_of, requirements_of
from support.slow import slow_except

CPU = torch.device("cpu")
Decision = tuple[Strategy, int, int, int, int, int, int]


class FakeLink(ZeroCopyLink):
    """The link of a simulated machine: copies nothing and reports a given free memory."""

    copies = True

    def __init__(self, device_bytes: int):
        super().__init__(CPU)
        self.device_bytes = device_bytes

    def device_available(self) -> int:
        return self.device_bytes


def random_case(seed: int) -> Case:
    """Return a case of any mode; every third one has mode `auto`."""
    case = case_of(seed)
    if seed % 3:
        return case
    return replace(case, settings=replace(case.settings, mode="auto", split_kv_layers=None))


def engine_on(case: Case, costs: CostModel, patch: pytest.MonkeyPatch) -> Engine:
    """Return an engine with the memory of the case's machine and these costs."""
    requirements, dtype = requirements_of(case), dtype_of(case.settings.dtype)
    link = FakeLink(int(case.hardware.device_memory) - requirements.weight_bytes)
    patch.setattr(decoding.models.runtime, "host_available", lambda: int(case.hardware.host_memory))
    patch.setattr(Runtime, "link_rate", lambda self: None)
    group = TensorParallelGroup()
    target, draft = (
        SimpleNamespace(config=config, group=group, embed=SimpleNamespace(weight=torch.empty(0)))
        for config in (case.target, case.draft)
    )
    target.embed.weight = torch.empty(0, dtype=dtype)
    arena = HostArena(link, dtype)
    models: Any = (target, draft if requirements.has_draft else None)
    engine = Engine(
        Runtime(*models, requirements.mode, case.settings, link, arena), None, frozenset()
    )
    engine.sessions.planner = Planner(engine.runtime.requirements, costs)
    return engine


def costs_of(case: Case, measured: bool) -> CostModel:
    """Return costs predicted from the machine, maybe with measured past requests."""
    costs = CostModel(case.hardware, case.acceptance)
    if not measured:
        return costs
    draw, requirements = random.Random(case.prompt), requirements_of(case)
    memory = Memory.of(case.hardware, requirements)
    for _ in range(3 if requirements.may_retrieve else 0):
        strategy = Strategy(draw.choice(requirements.candidate_modes), draw.choice((64, 512, 2048)))
        fixed = requirements.with_strategy(strategy)
        try:
            plan = Plan.place(RequestSpec(fixed, case.prompt, case.max_new_tokens), memory)
        except InsufficientMemoryError:
            continue
        past = [
            RoundStats(16, draw.randint(0, 16), 17, draw.uniform(1e-4, 1e-1), draw.uniform(0.01, 1))
            for _ in range(20)
        ]
        costs.record(plan, past)
    return costs


def decision(plan: Plan, costs: CostModel) -> Decision:
    """Return strategy, resident, deferred and split layers, ring, and draft length."""
    memory, length = plan.memory, costs.forecast(plan).num_draft_tokens
    ring = (memory.slots, memory.slot_heads)
    layers = (memory.resident_layers, memory.deferred_layers, memory.split_layers)
    return plan.requirements.strategy, *layers, *ring, length


def plan_decision(case: Case, costs: CostModel) -> Decision | None:
    """Return the decision of `tierforce plan`; None if nothing fits."""
    try:
        plan = Planner(requirements_of(case), costs).plan(case.prompt, case.max_new_tokens)
    except InsufficientMemoryError:
        return None
    return decision(plan, costs)


def engine_decision(case: Case, costs: CostModel) -> Decision | None:
    """Return the decision of an engine; None if nothing fits."""
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_on(case, costs, patch)
        try:
            plan = engine.plan(case.prompt, case.max_new_tokens)
        except InsufficientMemoryError:
            return None
        return decision(plan, costs)


@pytest.mark.parametrize("measured", slow_except([False, True], 1), ids=["predicted", "measured"])
def test_planner_and_engine_decide_the_same(measured: bool) -> None:
    """80 random machines with random models, prompts and settings."""
    decisions: list[Decision] = []
    auto_modes: Counter[str] = Counter()
    for seed in range(80):
        case = random_case(seed)
        costs = costs_of(case, measured)
        planned = plan_decision(case, costs)
        assert planned == engine_decision(case, deepcopy(costs)), f"case {seed}"
        if planned is not None:
            decisions.append(planned)
            auto_modes[planned[0].mode] += case.settings.mode == "auto"
    # The cases differ in every part of the decision.
    assert len(decisions) > 40
    for choices in zip(*decisions, strict=True):
        assert len(set(choices)) > 1
    assert min(auto_modes["hierarchical"], auto_modes["split-hierarchical"]) > 2, auto_modes


def test_comparison_detects_a_difference() -> None:
    """With slightly less memory the engine sometimes decides differently."""
    differences = 0
    for seed in range(60):
        case = case_of(seed)
        less = replace(case.hardware, device_memory=int(0.94 * case.hardware.device_memory))
        costs = costs_of(case, measured=False)
        planned = plan_decision(case, costs)
        differences += planned is not None and planned != engine_decision(
            replace(case, hardware=less), costs
        )
    assert differences > 5


@pytest.mark.parametrize("seed", range(12))
def test_adaptive_length_is_close_to_the_planned_one(seed: int) -> None:
    """The rounds have exactly the predicted times and yields."""
    original = case_of(seed)
    original_settings = replace(original.settings, split_kv_layers=None)
    case = replace(
        original, settings=replace(original_settings, mode="hierarchical", retrieval_budget=64)
    )
    settings = replace(case.settings, num_draft_tokens=None, gpu_kv_layers=None)
    case = replace(case, settings=settings)
    requirements, costs = requirements_of(case), costs_of(case, measured=False)
    machine = replace(case.hardware, device_memory=1e12, host_memory=1e13)
    spec = RequestSpec(requirements, case.prompt, case.max_new_tokens)
    cost = costs.round_cost(Plan.place(spec, Memory.of(machine, requirements)))
    lengths = settings.draft_length_range(settings.mode)
    best, seconds = cost.best_length(lengths)
    adaptive, rate = Adaptive(lengths[-1]), cost.acceptance
    adaptive.reset(6)
    for number in range(400):
        drafted = max(1, min(64, adaptive.next() + (-2, 0, 2)[number % 3]))
        # accepted tokens per rejection at exactly this rate
        accepted: Any = rate / (1 - rate)
        adaptive.record(
            RoundStats(
                drafted=max(drafted, int(accepted) + 1),
                accepted=accepted,
                rows=drafted + 1,
                draft_s=max(drafted, int(accepted) + 1) * cost.drafted_s,
                verify_s=cost.verification_s(drafted),
            )
        )
    adapted = cost.best_length([adaptive.next()])[1]
    assert adapted <= 1.05 * seconds, (adaptive.next(), best)
