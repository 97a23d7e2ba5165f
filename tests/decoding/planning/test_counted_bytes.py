"""What the planner counts is what is allocated, tier by tier, before and behind prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.config.settings import Settings
from decoding.engine.session import SequenceState
from decoding.models.runtime import Runtime
from decoding.planning.memory_plan import MemoryPlan, device_breakdown
from decoding.planning.memory_requirements import Requirements
from decoding.planning.what_if import PlanReport, plan_request
from offload.dtypes import dtype_of
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.shape import TieredCacheSpec
from parallel.model.loading import random_model
from parallel.ranks.process_group import TensorParallelGroup
from support.planning import MODES, Case, case_of, needs_of, with_budget


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
    elif isinstance(value, list | tuple | set | frozenset | deque):
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


OF_THE_TARGET = (
    "resident layers",
    "ring, in prefill one layer",
    "recent tokens",
    "high_bytes",
    "joining slices",
)


@contextmanager
def session_of(
    case: Case, link: str, room: int | None = None
) -> Iterator[tuple[SequenceState, PlanReport]]:
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
    dtype, group = dtype_of(settings.dtype), TensorParallelGroup()
    target, draft = random_model(case.target, group, dtype), None
    if needs_of(case).has_draft:
        draft = random_model(case.draft, group, dtype)
    runtime = Runtime.create(target, draft, settings.mode, settings)
    needs = replace(needs_of(replace(case, settings=settings)), copies=runtime.link.copies)
    try:
        session = SequenceState(runtime, [1] * case.prompt, case.new)
        yield (
            session,
            plan_request(
                with_budget(needs, runtime.requirements.budget), rich, case.prompt, case.new
            ),
        )
    finally:
        runtime.link.close()


def check_bytes(case: Case, link: str, room: int | None = None) -> MemoryPlan:
    """Compare each tier, before and behind prefill, with what is counted; return the plan."""
    with session_of(case, link, room) as (session, ahead):
        assert session.plan == ahead.plan
        rotary, arena, following = session.target.rotary, session.runtime.arena, session.retrieval
        others = (rotary, arena, following)
        for tiers in (ahead.prefill_memory, ahead.decode_memory):
            assert held(session.target, *others) == sum(tiers[name] for name in OF_THE_TARGET)
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
        kept_layers = len(session.runtime.requirements.retrieval_layers(session.target.shape))
        layout = replace(session.target.layout, layers=kept_layers)
        shape = following.shape
        traits = POLICY_SPECS[session.runtime.settings.policy]
        rows = traits.query_rows * case.target.heads // case.target.kv_heads
        remembered = traits.state_bytes(layout, shape.context, shape.chunk)
        # there is room for that of the longest text
        assert held(following.selector.policy) <= remembered
        counted -= shape.scratch_bytes(layout, rows) + remembered
        assert held(following, rotary, following.selector.policy) == counted
        return ahead.plan


def rotary_extra(rotary: Any) -> int:
    return sum(each.nbytes for each in tensors(rotary, set()) if each.shape[0] != rotary.length)


def tiny(seed: int) -> Case:
    """Return a case small enough to be made; its mode and layers follow from `seed`."""
    case = case_of(1000 + seed, tiny=True)
    settings = replace(
        case.settings,
        split_kv_layers=None,
        gpu_kv_layers=seed // len(MODES) % (case.target.layers + 1),
        retrieval_budget=case.settings.retrieval_budget or 128,
    )
    return replace(case, settings=in_mode(settings, MODES[seed % len(MODES)]))


def in_mode(settings: Settings, mode: str) -> Settings:
    """Return the settings in another mode, and in 16 bits where that needs it."""
    dtype = "bfloat16" if "split" in mode else settings.dtype
    return replace(settings, mode=mode, dtype=dtype, split_kv_layers=None)


@pytest.mark.parametrize("link", ["view", "emulated:50"])
@pytest.mark.parametrize("seed", range(32))
def test_what_is_counted_is_what_is_allocated(seed: int, link: str) -> None:
    check_bytes(tiny(seed), link)


@pytest.mark.parametrize(
    ("mode", "deferred"), [*((mode, 1) for mode in MODES), ("split", 3), ("split-hierarchical", 4)]
)
def test_layers_that_come_late_are_counted_too(mode: str, deferred: int) -> None:
    """In memory that has room for two layers, and maybe codes, but not in prefill."""
    case = tiny(3)
    settings = replace(in_mode(case.settings, mode), gpu_kv_layers=2, prefill_chunk=2000)
    case = replace(case, settings=settings, prompt=2000)
    needs = with_budget(needs_of(case), settings.retrieval_budget)
    split = case.target.layers - 2 if needs.has_split else 0
    tiers = device_breakdown(needs.memory(case.prompt, case.new), 2, deferred, split)
    room = max(sum(phase.values()) for phase in tiers)
    plan = check_bytes(case, "emulated:50", room)
    assert (plan.resident_layers, plan.deferred_layers, plan.split_layers) == (2, deferred, split)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TieredCacheSpec, "device_breakdown"),
        (RetrievalCacheSpec, "layer_bytes"),
        (RetrievalCacheSpec, "shared_bytes"),
        (Requirements, "_draft_bytes"),
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
        check_bytes(tiny(0), "emulated:50")  # which has all caches
