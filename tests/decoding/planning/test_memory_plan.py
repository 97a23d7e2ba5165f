"""The memory plan: as many resident layers as fit, sizes equal to the caches', clear errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decoding.planning.memory_plan import (
    MemoryPlan,
    MemoryRequirements,
    device_breakdown,
    plan_memory,
)
from offload.errors import InsufficientMemoryError
from offload.layout import KVLayout
from offload.memory.cpu_link import EmulatedLink
from offload.memory.host_arena import HostArena
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from support.links import CPU
from support.reference import random_rotary

GB = 10**9
SIZES = 5, 12, 7  # recent tokens, block size, query tokens of a forward
TAIL = sum(SIZES)
LLAMA_7B = KVLayout(layers=32, heads=16, head_dim=128, dtype=torch.float16)  # one of two ranks
LLAMA_REQUIREMENTS = MemoryRequirements(
    TieredCacheSpec.with_ring(LLAMA_7B, 130_048, 0, 156, 100, copies=True),
    retrieval=GB // 2,
    draft=GB // 10,
    tables=GB // 20,
    hidden=GB,
)
LAYOUT, CONTEXT = KVLayout(4, 3, 8, torch.float32), 3000
SMALL_REQUIREMENTS = MemoryRequirements(
    TieredCacheSpec.with_ring(LAYOUT, CONTEXT, *SIZES, copies=True),
    retrieval=1000,
    draft=200,
    tables=30,
    hidden=7,
)
LAYER = LAYOUT.bytes(CONTEXT, 1)


def without_copies(requirements: MemoryRequirements) -> MemoryRequirements:
    return replace(requirements, target=replace(requirements.target, copies=False))


@pytest.mark.parametrize(
    "requirements", [LLAMA_REQUIREMENTS, SMALL_REQUIREMENTS, without_copies(SMALL_REQUIREMENTS)]
)
def test_resident_layers_grow_with_device_memory(
    requirements: MemoryRequirements,
) -> None:
    max_bytes = (
        requirements.target.layout.bytes(requirements.target.capacity)
        + requirements.retrieval
        + requirements.draft
        + requirements.tables
        + requirements.hidden
    )
    min_bytes = plan_memory(requirements, 10**15, 10**15, resident_layers=0).device_bytes
    counts = []
    for step in range(101):
        device = min_bytes + (max_bytes - min_bytes) * step // 100
        plan = plan_memory(requirements, device, 10**15)
        assert plan.device_bytes <= device
        counts.append(plan.resident_layers)
        if plan.resident_layers < requirements.target.layout.layers:  # one more does not fit
            assert (
                plan_memory(requirements, 10**15, 10**15, plan.resident_layers + 1).device_bytes
                > device
            )
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, requirements.target.layout.layers)


def test_bytes_of_a_plan() -> None:
    layout, fixed = LAYOUT, 1000 + 200 + 30 + 7
    resident = plan_memory(SMALL_REQUIREMENTS, 10**9, 0)  # no host memory
    assert (resident.resident_layers, resident.host_bytes, resident.device_bytes) == (
        4,
        0,
        fixed + layout.bytes(3000),
    )
    partial = plan_memory(SMALL_REQUIREMENTS, 10**9, 10**9, resident_layers=1)
    assert partial.host_bytes == layout.bytes(3000, 3)
    views = plan_memory(without_copies(SMALL_REQUIREMENTS), 10**9, 10**9, resident_layers=1)
    # neither a ring nor a staging buffer
    assert views.device_bytes == fixed + layout.bytes(3000, 1) + layout.bytes(TAIL, 3)
    assert partial.device_bytes > views.device_bytes


@pytest.mark.parametrize("resident", range(5))
# the ring is larger than a layer with 3 heads, smaller with 80
@pytest.mark.parametrize("heads", [3, 80])
@pytest.mark.parametrize("deferred", [0, 2])
def test_plan_covers_the_cache_allocations(resident: int, heads: int, deferred: int) -> None:
    link, layout = EmulatedLink(CPU, 1e12), replace(LAYOUT, heads=heads)
    deferred = min(deferred, resident) if resident < layout.layers else 0
    shape = TieredCacheSpec.with_ring(layout, CONTEXT, *SIZES, copies=True)
    hidden = deferred * layout.bytes(CONTEXT, 1)
    requirements = MemoryRequirements(shape, retrieval=0, draft=0, tables=0, hidden=hidden)
    room = sum(device_breakdown(requirements, resident, deferred)[0].values())
    plan = plan_memory(requirements, room, 10**9, resident)
    assert plan.deferred_layers == deferred
    arena = HostArena(link, torch.float32)
    rotary = random_rotary(layout, 8)
    cache = TieredCache(shape.with_placement(resident, deferred), link, rotary, arena)
    with Prefill(cache, 3000):  # hidden states, ring and the current layer
        assert cache.device_bytes + requirements.hidden == room
    cache.onload_deferred()
    assert (
        cache.device_bytes
        == sum(device_breakdown(requirements, resident, deferred)[1].values())
        <= plan.device_bytes
    )
    assert arena.nbytes == plan.host_bytes
    link.close()


@pytest.mark.parametrize(
    "requirements", [LLAMA_REQUIREMENTS, replace(SMALL_REQUIREMENTS, hidden=3 * LAYER)]
)
def test_memory_of_hidden_states_is_used_for_deferred_layers(
    requirements: MemoryRequirements,
) -> None:
    """No further layer fits during decoding, and host memory holds only the layers that do not fit
    beside the hidden states.
    """
    layers = requirements.target.layout.layers
    deferred_counts = set()
    fixed = plan_memory(requirements, 10**15, 10**15, 0).device_bytes
    for share in range(1, 50):
        room = fixed + share * requirements.target.layout.bytes(requirements.target.capacity) // 50
        plan = plan_memory(requirements, room, 10**15)
        deferred_counts.add(plan.deferred_layers)
        prefill, decoding = (
            sum(tiers.values())
            for tiers in device_breakdown(requirements, plan.resident_layers, plan.deferred_layers)
        )
        assert max(prefill, decoding) == plan.device_bytes <= room
        # a plan in which hidden states are never freed
        without_deferred = plan_memory(
            replace(requirements, hidden=0), room - requirements.hidden, 10**15
        )
        assert without_deferred.resident_layers <= plan.resident_layers
        assert without_deferred.host_bytes >= plan.host_bytes
        assert plan.host_bytes == requirements.target.layout.bytes(
            requirements.target.capacity, layers - plan.resident_layers + plan.deferred_layers
        )
        if plan.resident_layers < layers - 1:
            assert sum(device_breakdown(requirements, plan.resident_layers + 1)[1].values()) > room
        if plan.deferred_layers:
            assert (
                sum(
                    device_breakdown(requirements, plan.resident_layers, plan.deferred_layers - 1)[
                        0
                    ].values()
                )
                > room
            )
    assert min(deferred_counts) == 0 < max(deferred_counts)


def test_deferred_layers_require_offloaded_layers_and_a_copying_link() -> None:
    large_hidden = replace(SMALL_REQUIREMENTS, hidden=2 * LAYER)
    views = without_copies(large_hidden)
    min_bytes = plan_memory(views, 10**9, 10**15, 0).device_bytes
    plans = [
        plan_memory(views, min_bytes + share * LAYOUT.bytes(3000) // 20, 10**15)
        for share in range(21)
    ]
    assert {plan.deferred_layers for plan in plans} == {0}
    assert {plan.resident_layers for plan in plans} == {0, 1, 2, 3, 4}
    # no ring to onload through if all layers are resident
    with pytest.raises(InsufficientMemoryError, match="fewer `gpu_kv_layers`"):
        plan_memory(large_hidden, LAYOUT.bytes(3000) + 5000, 10**15, resident_layers=4)


def test_resident_layers_are_configurable() -> None:
    for count in range(33):
        assert (
            plan_memory(LLAMA_REQUIREMENTS, 10**15, 10**15, resident_layers=count).resident_layers
            == count
        )
    with pytest.raises(InsufficientMemoryError, match="fewer `gpu_kv_layers`"):
        plan_memory(LLAMA_REQUIREMENTS, 24 * GB, 10**15, resident_layers=32)
    for count in (-1, 33):
        with pytest.raises(
            InsufficientMemoryError,
            match=f"`gpu_kv_layers` {count} is not between 0 and the model's 32 layers",
        ):
            plan_memory(LLAMA_REQUIREMENTS, 10**15, 10**15, resident_layers=count)


def test_errors_state_required_and_available_memory() -> None:
    min_bytes = plan_memory(LLAMA_REQUIREMENTS, 10**15, 10**15, resident_layers=0).device_bytes
    with pytest.raises(
        InsufficientMemoryError,
        match=rf"needs {min_bytes / 1e9:.3f} GB of device memory .* and 1\.500 GB are available",
    ):
        plan_memory(LLAMA_REQUIREMENTS, 3 * GB // 2, 10**15)
    with pytest.raises(InsufficientMemoryError, match=r"0\.000 GB are available"):
        plan_memory(LLAMA_REQUIREMENTS, -GB, 10**15)  # the weights alone exceed the memory
    host = LLAMA_7B.bytes(130_048)
    with pytest.raises(
        InsufficientMemoryError,
        match=rf"130048 tokens needs {host / 1e9:.2f} GB of host memory per rank and 20\.00 GB are",
    ):
        plan_memory(LLAMA_REQUIREMENTS, min_bytes, 20 * GB)


def test_llama_7b_on_a_24_gb_card() -> None:
    """13.5 GB of weights over two ranks and 1.065 GB of KV per layer leave 12 or more resident."""
    assert LLAMA_7B.bytes(130_048, 1) == 1_065_353_216
    plan = plan_memory(LLAMA_REQUIREMENTS, int(23.5 * GB - 6.74 * GB), 64 * GB)
    assert 12 <= plan.resident_layers <= 14
    assert isinstance(plan, MemoryPlan)


def test_memory_of_hidden_states_is_used_for_split_layers() -> None:
    """No further layer can be split during decoding, and no fewer layers can be deferred."""
    layout = replace(LAYOUT, heads=80, layers=8, dtype=torch.bfloat16)
    shape = TieredCacheSpec.with_ring(layout, CONTEXT, *SIZES, copies=True)
    hidden = 2 * layout.bytes(CONTEXT, 1)
    requirements = MemoryRequirements(
        shape, retrieval=0, draft=0, tables=0, hidden=hidden, splitting=True
    )

    def phase_bytes(resident: int, deferred: int, split: int) -> list[int]:
        phases = device_breakdown(requirements, resident, deferred, split)
        return [sum(tiers.values()) for tiers in phases]

    def fits(resident: int, split: int) -> bool:
        on_device = resident + split
        return any(
            max(phase_bytes(resident, deferred, split)) <= room for deferred in range(on_device + 1)
        )

    min_bytes, max_bytes = max(phase_bytes(0, 0, 0)), max(phase_bytes(8, 0, 0))
    cases = set()
    for share in range(101):
        room = min_bytes + share * (max_bytes - min_bytes) // 100
        plan = plan_memory(requirements, room, 10**12)
        resident, deferred, split = plan.resident_layers, plan.deferred_layers, plan.split_layers
        cases.add((resident > 0, 0 < deferred <= resident, deferred > resident))
        assert max(phase_bytes(resident, deferred, split)) == plan.device_bytes <= room
        if deferred:
            assert phase_bytes(resident, deferred - 1, split)[0] > room
        if resident + split < 8:
            assert not resident
            assert not fits(0, split + 1)
        elif split > 0:
            assert not fits(resident + 1, split - 1)
    assert (False, False, True) in cases  # only split layers, some of them deferred
    assert (True, False, True) in cases  # all resident and some split layers deferred
    assert (True, True, False) in cases
    with pytest.raises(
        InsufficientMemoryError, match=r"fewer `gpu_kv_layers`, fewer `split_kv_layers`, a"
    ):
        plan_memory(requirements, min_bytes // 2, 10**9, 4, 4)


@pytest.mark.parametrize("context", [1, 1000, 4096, 130_048, 2_000_000])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_ring_size(context: int, heads: int) -> None:
    layout = KVLayout(2, heads, 128, torch.float16)
    shape = TieredCacheSpec.with_ring(layout, context, 0, 1, 1, copies=True)
    slot_heads, slots, head = shape.slot_heads, shape.slots, 2 * context * 128 * 2
    size = slots * slot_heads * head
    assert 1 <= slot_heads <= heads
    assert slots >= 2
    assert shape.buffers.ring_numel * 2 == max(size, layout.bytes(context, 1))
    assert size <= max(2**30, layout.bytes(context, 1)) or slots == 2
    # 2 MB each for keys and values, unless the layer is smaller
    assert slot_heads == heads or slot_heads * head >= 4 << 20
