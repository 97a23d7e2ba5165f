"""`tierforce plan` and the engine are one planner: given the same numbers they decide the same, and
what is counted is what is allocated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import decoding.planning.needs
import decoding.runtime
from decoding import Engine, Settings
from decoding.planning.budget import BudgetChooser
from decoding.planning.cost import Acceptance, CostSource, PredictedCosts
from decoding.planning.fit import fit, memory_of
from decoding.planning.needs import TextNeeds, counted_dtype
from decoding.planning.observed import ObservedCosts
from decoding.planning.outlook import Outlook, look_ahead
from decoding.planning.profile import HardwareProfile
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.settings import dtype_of
from decoding.speculation.draft_length import Adaptive, RoundStats
from offload.errors import FitError
from offload.link import ViewLink
from offload.memory_plan import MemoryPlan, device_tiers
from offload.policies import POLICY_NAMES, POLICY_TRAITS
from offload.retrieval_shape import RetrievalShape
from offload.store import HostArena
from offload.tiered_shape import TieredShape
from parallel.config import ModelConfig
from parallel.group import Group
from parallel.loading import random_model

CPU = torch.device("cpu")
MODES = ("plain", "retrieval", "speculative", "hierarchical")
Decision = tuple[int | None, int, int, int, int, int]


@dataclass(frozen=True)
class Case:
    """Models, a machine, a text and settings."""

    target: ModelConfig
    draft: ModelConfig
    hardware: HardwareProfile
    settings: Settings
    prompt: int
    new: int
    acceptance: Acceptance


def dimensions(draw: random.Random, tiny: bool) -> ModelConfig:
    kv_heads, group = draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
    head_dim = draw.choice((8, 16) if tiny else (32, 64, 128))
    hidden = kv_heads * group * head_dim
    return ModelConfig.from_hf(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=draw.randint(1, 4) * hidden,
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            num_hidden_layers=draw.randint(1, 5 if tiny else 24),
            vocab_size=97,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=draw.random() < 0.3,
        )
    )


def settings_of(draw: random.Random, layers: int, context: int) -> Settings:
    chunk = draw.choice((1, 4, 8))
    return Settings(
        mode=draw.choice(MODES),
        dtype=draw.choice(("bfloat16", "float32")),
        budget=draw.choice((None, None, max(chunk, context // draw.randint(2, 20)))),
        chunk_size=chunk,
        policy=draw.choice(POLICY_NAMES),
        refresh=draw.choice((None, None, 4)),
        draft_length=draw.choice((None, None, draw.randint(1, 20))),
        inner_length=draw.choice((None, 3)),
        window=draw.randint(4, 64),
        resident_layers=draw.choice((None, None, draw.randint(0, layers))),
        prefill_chunk=draw.choice((None, 256)),
    )


def case_of(seed: int, tiny: bool = False) -> Case:
    """Return a case in which layers have to be shared out between device and host, mostly."""
    draw = random.Random(seed)
    target, draft = dimensions(draw, tiny), replace(dimensions(draw, True), layers=2)
    context = draw.randint(80, 500) if tiny else int(10 ** draw.uniform(2.5, 6))
    new = draw.randint(1, context // 3)
    settings = settings_of(draw, target.layers, context)
    item = counted_dtype(settings.dtype)
    kv = target.kv_layout(1, item).bytes(context)
    weights = decoding.planning.needs.weight_bytes(target, 1, item)
    hardware = HardwareProfile(
        name=f"machine {seed}",
        gpus=1,
        device_memory=int(1.2 * weights + draw.uniform(0.3, 3) * kv + 3e7),
        host_memory=int(draw.uniform(0.7, 3) * kv + 1e6),
        link_in=10 ** draw.uniform(8, 11),
        link_out=10 ** draw.uniform(8, 11),
        memory_rate=10 ** draw.uniform(10, 12.3),
        matmul=10 ** draw.uniform(11, 14.5),
        all_reduce_s=0.0,
        all_reduce_rate=1e15,
        layer_s=draw.choice((0.0, 6e-5)),
        runs_ahead=draw.random() < 0.7,
    )
    rates = Acceptance(draw.uniform(0.3, 0.99), draw.uniform(0.2, 0.9))
    return Case(target, draft, hardware, settings, context - new, new, rates)


def needs_of(case: Case) -> TextNeeds:
    """Return the needs as `tierforce plan` has them: no models, and no torch."""
    mode, item = case.settings.mode, counted_dtype(case.settings.dtype)
    return TextNeeds(case.target, case.draft, mode, case.settings, item, 1, 1, True)


class GivenLink(ViewLink):
    """A link of a machine that is not there: it copies nothing, and says what memory is free."""

    copies = True

    def __init__(self, device_bytes: int):
        super().__init__(CPU)
        self.device_bytes = device_bytes

    def device_available(self) -> int:
        return self.device_bytes


def engine_on(case: Case, costs: CostSource, patch: pytest.MonkeyPatch) -> Engine:
    """Return an engine that finds the memory of the case's machine, and knows `costs`."""
    needs, dtype = needs_of(case), dtype_of(case.settings.dtype)
    link = GivenLink(int(case.hardware.device_memory) - needs.weight_bytes)
    patch.setattr(decoding.runtime, "host_available", lambda: int(case.hardware.host_memory))
    patch.setattr(Runtime, "link_rate", lambda self: None)
    group = Group()
    target, draft = (
        SimpleNamespace(config=config, group=group, embed=SimpleNamespace(weight=torch.empty(0)))
        for config in (case.target, case.draft)
    )
    target.embed.weight = torch.empty(0, dtype=dtype)
    arena = HostArena(link, dtype)
    models: Any = (target, draft if needs.has_draft else None)
    engine = Engine(
        Runtime(*models, case.settings.mode, case.settings, link, arena), None, frozenset()
    )
    engine.sessions.chooser = BudgetChooser(costs)
    return engine


def costs_of(case: Case, observed: bool) -> CostSource:
    """Return the machine's own costs, or those of past texts with budgets that would fit."""
    if not observed:
        return PredictedCosts(case.hardware, case.acceptance)
    draw, needs = random.Random(case.prompt), needs_of(case)
    costs, memory = ObservedCosts(case.hardware.link_in), memory_of(case.hardware, needs)
    for _ in range(3 if needs.has_retrieval else 0):
        spent = needs.with_budget(draw.choice((64, 512, 2048)))
        try:
            plan = fit(spent, memory, case.prompt, case.new)
        except FitError:
            continue
        past = [
            RoundStats(16, draw.randint(0, 16), 17, draw.uniform(1e-4, 1e-1), draw.uniform(0.01, 1))
            for _ in range(20)
        ]
        costs.record(spent, plan, case.prompt, past)
    return costs


def decision(
    budget: int | None, plan: MemoryPlan, costs: CostSource, needs: TextNeeds, prompt: int
) -> Decision:
    """Return budget, resident and late layers, ring, and draft length."""
    cost = costs.round_cost(needs.with_budget(budget), plan, prompt)
    length = 0 if cost is None else cost.best_length(needs.draft_lengths)[0]
    ring = (plan.slots, plan.slot_heads)
    return budget, plan.resident_layers, plan.late_layers, *ring, length


def by_plan(case: Case, costs: CostSource) -> Decision | None:
    """Return what `tierforce plan` decides; None where nothing fits."""
    needs = needs_of(case)
    try:
        ahead = look_ahead(needs, case.hardware, case.prompt, case.new, case.acceptance, costs)
    except FitError:
        return None
    budget = ahead.needs.budget if needs.has_retrieval else None
    found = decision(budget, ahead.plan, costs, ahead.needs, case.prompt)
    if isinstance(costs, PredictedCosts) and needs.mode != "plain":
        assert found[-1] == ahead.forecast.draft_length
    return found


def by_engine(case: Case, costs: CostSource) -> Decision | None:
    """Return what an engine decides; None where it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_on(case, costs, patch)
        try:
            plan = engine.check(case.prompt, case.new)
        except FitError:
            return None
        budget = engine.sessions.choose(case.prompt, case.new).budget
        needs = engine.runtime.needs
        if not needs.has_retrieval:
            budget = None
        return decision(budget, plan, costs, needs, case.prompt)


@pytest.mark.parametrize("observed", [False, True], ids=["predicted", "observed"])
def test_both_decide_the_same(observed: bool) -> None:
    """On 120 machines, with models, texts and settings as they come."""
    decided: list[Decision] = []
    for seed in range(120):
        case = case_of(seed)
        costs = costs_of(case, observed)
        found = by_plan(case, costs)
        assert found == by_engine(case, deepcopy(costs)), f"case {seed}"
        if found is not None:
            decided.append(found)
    # and there was something to decide
    assert len(decided) > 60
    for choices in zip(*decided, strict=True):
        assert len(set(choices)) > 1


def test_the_comparison_sees_a_difference() -> None:
    """Of a machine with a little less memory the engine decides something else, sometimes."""
    differs = 0
    for seed in range(60):
        case = case_of(seed)
        less = replace(case.hardware, device_memory=int(0.97 * case.hardware.device_memory))
        costs = costs_of(case, observed=False)
        found = by_plan(case, costs)
        differs += found is not None and found != by_engine(replace(case, hardware=less), costs)
    assert differs > 5


@pytest.mark.parametrize("seed", range(12))
def test_the_length_that_adapts_is_near_the_one_that_is_planned(seed: int) -> None:
    """Fed with rounds that take and yield what is predicted, without noise."""
    case = replace(
        case_of(seed), settings=replace(case_of(seed).settings, mode="hierarchical", budget=64)
    )
    case = replace(case, settings=replace(case.settings, draft_length=None, resident_layers=None))
    needs, costs = needs_of(case), costs_of(case, observed=False)
    rich = replace(case.hardware, device_memory=1e12, host_memory=1e13)
    plan = fit(needs, memory_of(rich, needs), case.prompt, case.new)
    cost = costs.round_cost(needs, plan, case.prompt)
    assert cost is not None
    best, seconds = cost.best_length(needs.draft_lengths)
    adaptive, rate = Adaptive(needs.draft_lengths[-1]), cost.acceptance
    adaptive.begin(6)
    for number in range(400):
        drafted = max(1, min(64, adaptive.next() + (-2, 0, 2)[number % 3]))
        # one rejection in so many tokens that were tested: the rate exactly
        stood: Any = rate / (1 - rate)
        adaptive.record(
            RoundStats(
                drafted=max(drafted, int(stood) + 1),
                accepted=stood,
                rows=drafted + 1,
                draft_s=max(drafted, int(stood) + 1) * cost.drafted_s,
                verify_s=cost.verification_s(drafted),
            )
        )
    adapted = cost.best_length([adaptive.next()])[1]
    assert adapted <= 1.05 * seconds, (adaptive.next(), best)


# -- bytes -----------------------------------------------------------------------------------------


def tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, whatever holds them for it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from tensors(each, seen)
    elif type(value).__module__.startswith("offload."):
        yield from tensors(vars(value) if hasattr(value, "__dict__") else (), seen)


def held(value: Any, *others: Any) -> int:
    """Return the bytes of the memory behind an object's tensors, without that of others."""
    without = {each.untyped_storage().data_ptr() for each in tensors(others, set())}
    memory = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors(value, set())
    }
    return sum(size for address, size in memory.items() if address not in without)


@contextmanager
def session_of(case: Case, link: str, room: int | None = None) -> Iterator[tuple[Session, Outlook]]:
    """Yield a session on real models, and what `tierforce plan` says of it.

    `room`: device bytes beside the weights, by default more than enough.
    """
    weights = needs_of(case).weight_bytes
    settings = replace(case.settings, link=link)
    rich = replace(case.hardware, device_memory=1e10, host_memory=1e10)
    if room is not None:
        # of which a plan uses 0.9
        rich = replace(rich, device_memory=weights + room / 0.9 + 2)
        settings = replace(settings, device_memory=weights + room)
    dtype, group = dtype_of(settings.dtype), Group()
    target, draft = random_model(case.target, group, dtype), None
    if needs_of(case).has_draft:
        draft = random_model(case.draft, group, dtype)
    runtime = Runtime.make(target, draft, settings.mode, settings)
    needs = replace(needs_of(replace(case, settings=settings)), copies=runtime.link.copies)
    try:
        session = Session(runtime, [1] * case.prompt, case.new)
        yield (
            session,
            look_ahead(needs.with_budget(runtime.needs.budget), rich, case.prompt, case.new),
        )
    finally:
        runtime.link.close()


def check_bytes(case: Case, link: str, room: int | None = None) -> MemoryPlan:
    """Compare each tier, before and behind prefill, with what is counted; return the plan."""
    with session_of(case, link, room) as (session, ahead):
        assert session.plan == ahead.plan
        rotary, arena, following = session.target.rotary, session.runtime.arena, session.retrieval
        others = (rotary, arena, following)
        for tiers in (ahead.prefill_tiers, ahead.decode_tiers):
            names = ("resident layers", "ring, in prefill one layer", "recent tokens")
            assert held(session.target, *others) == sum(tiers[name] for name in names)
            with torch.inference_mode():
                if not session.target.length:
                    session.prefill()
        assert held(arena) == ahead.plan.host_bytes
        assert held(rotary) - rotary_extra(rotary) == tiers["rotary tables"]
        kept = held(session.draft, session.draft and session.draft.rotary)
        assert kept == tiers["draft cache"]
        counted = tiers["retrieval cache"]
        if following is None:
            assert counted == 0
            return ahead.plan
        layout, shape = session.target.layout, following.shape
        traits = POLICY_TRAITS[session.runtime.settings.policy]
        rows = traits.rows * case.target.heads // case.target.kv_heads
        remembered = traits.state_bytes(layout, shape.context, shape.chunk)
        assert held(following.policy) <= remembered  # there is room for that of the longest text
        counted -= shape.scratch_bytes(layout, rows) + remembered
        assert held(following, rotary, following.policy) == counted
        return ahead.plan


def rotary_extra(rotary: Any) -> int:
    return sum(each.nbytes for each in tensors(rotary, set()) if each.shape[0] != rotary.length)


def tiny(seed: int) -> Case:
    """Return a case small enough to be made; its mode and layers follow from `seed`."""
    case = case_of(1000 + seed, tiny=True)
    return replace(
        case,
        settings=replace(
            case.settings,
            mode=MODES[seed % 4],
            resident_layers=seed // 4 % (case.target.layers + 1),
            budget=case.settings.budget or 128,
        ),
    )


@pytest.mark.parametrize("link", ["view", "emulated:50"])
@pytest.mark.parametrize("seed", range(24))
def test_what_is_counted_is_what_is_allocated(seed: int, link: str) -> None:
    check_bytes(tiny(seed), link)


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_come_late_are_counted_too(mode: str) -> None:
    """In memory that has room for two layers, but not in prefill."""
    case = tiny(3)
    settings = replace(case.settings, mode=mode, resident_layers=2)
    case = replace(case, settings=settings, prompt=2000)
    needs = needs_of(case).with_budget(settings.budget)
    tiers = device_tiers(needs.memory(case.prompt, case.new), 2, 1)
    room = max(sum(phase.values()) for phase in tiers)
    plan = check_bytes(case, "emulated:50", room)
    assert (plan.resident_layers, plan.late_layers) == (2, 1)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TieredShape, "device_tiers"),
        (RetrievalShape, "device_bytes"),
        (TextNeeds, "_draft_bytes"),
    ],
)
def test_the_comparison_sees_a_wrong_count(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte more in any of them."""
    counts = getattr(owner, name)

    def wrong(*arguments: Any) -> Any:
        counted = counts(*arguments)
        if isinstance(counted, dict):
            return {tier: nbytes + 1 for tier, nbytes in counted.items()}
        return counted + 1

    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check_bytes(tiny(3), "emulated:50")  # which has all caches
