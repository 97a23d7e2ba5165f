"""The planned bytes of each tier equal the allocated ones, before and after prefill."""

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
from decoding.planning.plan import Plan
from decoding.planning.request_spec import RequestSpec
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.dtypes import dtype_of
from offload.layout import RecurrentShape, SlidingWindow
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.retrieval.shape import RetrievalCacheSpec, SplitSelectionSpec
from offload.retrieval.split_selection import SplitSelection
from offload.tiered.device_view import OnDeviceCache
from offload.tiered.shape import TieredCacheSpec
from parallel.config.layer_heads import LatentShape
from parallel.model.loading import random_model
from parallel.ranks.process_group import TensorParallelGroup
from support.planning import MODES, Case, case_of, plan_on, requirements_of, with_budget
from support.slow import slow_except


def tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, directly or indirectly."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item, seen)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from tensors(item, seen)
    elif type(value).__module__.startswith("offload."):
        for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
            if name != "parent":  # the states of another level
                yield from tensors(item, seen)


def storage_bytes(value: Any, *others: Any) -> int:
    """Return the bytes of the storages of an object's tensors, without those of `others`."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in tensors(others, set())}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors(value, set())
    }
    return sum(size for address, size in storages.items() if address not in excluded)


TARGET_TIERS = (
    "resident layers",
    "layers with a window",
    "recurrent states",
    "ring, in prefill one layer",
    "device tail",
    "high_bytes",
    "reconstruction buffers",
)


@contextmanager
def session_of(
    case: Case, link: str, room: int | None = None
) -> Iterator[tuple[SequenceState, Plan]]:
    """Yield a session on real models, and its plan by `tierforce plan`.

    `room`: device bytes beside the weights, by default more than enough.
    """
    weights = requirements_of(case).weight_bytes
    settings = replace(case.settings, link=link)
    machine = replace(case.hardware, device_memory=1e10, host_memory=1e10)
    if room is not None:
        # A plan uses 0.9 of this memory.
        machine = replace(machine, device_memory=weights + room / 0.9 + 2)
        settings = replace(settings, device_memory=weights + room)
    dtype, group = dtype_of(settings.dtype), TensorParallelGroup()
    target, draft = random_model(case.target, group, dtype), None
    if requirements_of(case).has_draft:
        draft = random_model(case.draft, group, dtype)
    runtime = Runtime.create(target, draft, settings.mode, settings)
    requirements = replace(
        requirements_of(replace(case, settings=settings)), copies=runtime.link.copies
    )
    try:
        # equal tokens have equal latents, which may all be outliers of split floats
        prompt = [token % case.target.vocab for token in range(case.prompt)]
        session = SequenceState(runtime, prompt, case.max_new_tokens)
        fixed = with_budget(requirements, runtime.requirements.strategy.budget)
        yield session, plan_on(machine, fixed, case.prompt, case.max_new_tokens)
    finally:
        runtime.link.close()


def check_bytes(case: Case, link: str, room: int | None = None) -> MemoryPlan:
    """Compare allocated and planned tiers, before and after prefill; return the plan."""
    with session_of(case, link, room) as (session, plan):
        assert session.plan.memory == plan.memory
        rotary, arena, retrieval = session.target.rotary, session.slot.arena, session.retrieval
        states = [level.cache.recurrent for level in session.levels[1:] if level.name != "draft"]
        selection = split_selection(session)
        others = (rotary, arena, retrieval, selection, states)
        for tiers in plan.breakdown:
            assert storage_bytes(session.target, *others) == sum(
                tiers[name] for name in TARGET_TIERS
            )
            with torch.inference_mode():
                if not session.target.length:
                    session.prefill()
        assert storage_bytes(arena) == plan.memory.host_bytes
        assert storage_bytes(rotary) == tiers["rotary tables"]
        assert storage_bytes(states) == tiers["states of drafting levels"]
        drafts = [level.cache for level in session.levels if level.name == "draft"]
        draft = sum(storage_bytes(cache, cache.rotary) for cache in drafts)
        assert draft == tiers["draft cache"]
        planned, split = tiers["retrieval cache"], len(session.plan.split_selection_layers)
        others_selecting, scratch = session.plan.selecting_layers - split, 0
        for observer, layers in ((retrieval, others_selecting), (selection, split)):
            if observer is None:
                continue
            layout = session.target.layout.with_full_attention(layers)
            shape = observer.selector.shape
            spec = POLICY_SPECS[session.runtime.settings.policy]
            rows = spec.query_rows * case.target.heads // case.target.kv_heads
            policy_state = spec.state_bytes(layout, shape.context, shape.chunk)
            # The planned bytes cover the policy state of the longest request.
            assert storage_bytes(observer.selector.policy) <= policy_state
            packing = session.plan.spec.split_selection if observer is selection else None
            selecting = packing.packing_bytes(layout) if packing else 0
            scratch = max(scratch, shape.scratch_bytes(layout, rows) + selecting)
            planned -= policy_state
            own = (rotary, observer.selector.policy, getattr(observer, "recurrent", None))
            planned -= storage_bytes(observer, *own)
        assert planned == scratch
        return plan.memory


def split_selection(session: SequenceState) -> SplitSelection | None:
    """Return what holds selected tokens for the split level alone, if anything does."""
    for level in session.levels:
        if isinstance(level.cache, OnDeviceCache):
            selection = level.cache.selection
            return selection if isinstance(selection, SplitSelection) else None
    return None


def tiny(seed: int, windowed: int = 0) -> Case:
    """Return a case small enough to allocate; its mode and layers follow from `seed`.

    The first `windowed` layers have a window.
    """
    case = case_of(1000 + seed, tiny=True)
    if windowed:
        layers = frozenset(range(min(windowed, case.target.layers)))
        rope = {"rope_type": "default", "rope_theta": 1000.0}
        window = SlidingWindow(20, layers, step=150)
        target = replace(case.target, sliding_window=window, windowed_rope=rope)
        case = replace(case, target=target)
    settings = replace(
        case.settings,
        split_kv_layers=None,
        gpu_kv_layers=seed // len(MODES) % (case.target.full_layers + 1),
        retrieval_budget=case.settings.retrieval_budget or 128,
    )
    return replace(case, settings=in_mode(settings, MODES[seed % len(MODES)]))


def hybrid(seed: int) -> Case:
    """Return a tiny case in which all layers but every third have states, the draft's too.

    They are gated delta nets, or Mamba-2 if the seed is odd.
    """
    case = tiny(seed)
    models = {}
    for name, layers in (("target", 7), ("draft", 3)):
        recurrent = frozenset(index for index in range(layers) if (index + 1) % 3)
        shape = RecurrentShape(recurrent, 2, 6, 12, 8, 4, is_mamba=seed % 2 == 1, step=64)
        config = replace(getattr(case, name), layers=layers, nope_layers=frozenset())
        models[name] = replace(config, recurrent=shape, has_output_gates=True)
    settings = replace(case.settings, gpu_kv_layers=seed % 3)
    return replace(case, settings=settings, **models)


def latent(seed: int) -> Case:
    """Return a tiny case with latent attention."""
    case = tiny(seed)
    shape = LatentShape(20, 24, 8, 12, 10)
    sizes = {"kv_heads": 1, "head_dim": shape.head_dim, "rotary_dim": 8, "qk_norm": None}
    target = replace(case.target, latent=shape, has_shared_values=True, **sizes)
    return replace(case, target=target)


def in_mode(settings: Settings, mode: str) -> Settings:
    """Return the settings with another mode, and with 16 bits if the mode requires it."""
    dtype = "bfloat16" if "split" in mode else settings.dtype
    budget = 40 if "split" in mode else None
    return replace(settings, mode=mode, dtype=dtype, split_kv_layers=None, split_budget=budget)


@pytest.mark.parametrize("link", ["view", "emulated:50"])
@pytest.mark.parametrize("seed", range(32))
def test_planned_bytes_are_allocated(seed: int, link: str) -> None:
    check_bytes(tiny(seed), link)


@pytest.mark.parametrize("seed", slow_except(range(8), 1, 4, 6))
def test_planned_bytes_of_recurrent_states_are_allocated(seed: int) -> None:
    check_bytes(hybrid(seed), "emulated:50")


@pytest.mark.parametrize("seed", slow_except(range(16), 1, 4, 6))
def test_planned_bytes_of_latents_are_allocated(seed: int) -> None:
    check_bytes(latent(seed), "emulated:50")


@pytest.mark.parametrize("windowed", [1, 9])
@pytest.mark.parametrize("seed", slow_except(range(8), 1, 4, 6))
def test_planned_bytes_of_windows_are_allocated(seed: int, windowed: int) -> None:
    check_bytes(tiny(seed, windowed), "emulated:50")


@pytest.mark.parametrize(
    ("mode", "deferred"), [*((mode, 1) for mode in MODES), ("split", 3), ("split-hierarchical", 4)]
)
def test_bytes_of_deferred_layers_are_planned(mode: str, deferred: int) -> None:
    """The memory fits two layers, with any split layers, only after prefill."""
    case = tiny(3)
    settings = replace(in_mode(case.settings, mode), gpu_kv_layers=2, prefill_chunk=2000)
    case = replace(case, settings=settings, prompt=2000)
    requirements = with_budget(requirements_of(case), settings.retrieval_budget)
    split = case.target.layers - 2 if requirements.has_split else 0
    spec = RequestSpec(requirements, case.prompt, case.max_new_tokens)
    tiers = device_breakdown(spec.memory, 2, deferred, split)
    room = max(sum(phase.values()) for phase in tiers)
    plan = check_bytes(case, "emulated:50", room)
    assert (plan.resident_layers, plan.deferred_layers, plan.split_layers) == (2, deferred, split)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TieredCacheSpec, "device_breakdown"),
        (RetrievalCacheSpec, "layer_bytes"),
        (SplitSelectionSpec, "layer_bytes"),
        (RetrievalCacheSpec, "shared_bytes"),
        (StreamingCacheSpec, "device_bytes"),
    ],
)
def test_comparison_detects_a_wrong_count(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each count is off by one byte."""
    count = getattr(owner, name)

    def wrong(*arguments: Any) -> Any:
        result = count(*arguments)
        if isinstance(result, dict):
            return {tier: nbytes + 1 for tier, nbytes in result.items()}
        return result + 1

    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check_bytes(tiny(7), "emulated:50")  # a case with all caches
