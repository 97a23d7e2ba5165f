"""The memory plan: as many resident layers as fit, sums that hold against the caches themselves,
and errors with figures.
"""

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
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from offload.tiered.shape import TieredCacheSpec
from support.links import CPU
from support.reference import random_rotary

GB = 10**9
SIZES = 5, 12, 7  # recent tokens, a block, the rows of a pass
TAIL = sum(SIZES)
LLAMA_7B = KVLayout(layers=32, heads=16, head_dim=128, dtype=torch.float16)  # a rank of two
NEEDS = MemoryRequirements(
    TieredCacheSpec.with_ring(LLAMA_7B, 130_048, 0, 156, 100, copies=True),
    retrieval=GB // 2,
    draft=GB // 10,
    tables=GB // 20,
    hidden=GB,
)
LAYOUT, CONTEXT = KVLayout(4, 3, 8, torch.float32), 3000
SMALL = MemoryRequirements(
    TieredCacheSpec.with_ring(LAYOUT, CONTEXT, *SIZES, copies=True),
    retrieval=1000,
    draft=200,
    tables=30,
    hidden=7,
)
LAYER = LAYOUT.bytes(CONTEXT, 1)


def without_copies(needs: MemoryRequirements) -> MemoryRequirements:
    return replace(needs, target=replace(needs.target, copies=False))


@pytest.mark.parametrize("needs", [NEEDS, SMALL, without_copies(SMALL)])
def test_more_device_memory_never_means_fewer_resident_layers(needs: MemoryRequirements) -> None:
    everything = (
        needs.target.layout.bytes(needs.target.capacity)
        + needs.retrieval
        + needs.draft
        + needs.tables
        + needs.hidden
    )
    counts, least = [], plan_memory(needs, 10**15, 10**15, resident_layers=0).device_bytes
    for step in range(101):
        device = least + (everything - least) * step // 100
        plan = plan_memory(needs, device, 10**15)
        assert plan.device_bytes <= device
        counts.append(plan.resident_layers)
        if plan.resident_layers < needs.target.layout.layers:  # one more would not have fitted
            assert (
                plan_memory(needs, 10**15, 10**15, plan.resident_layers + 1).device_bytes > device
            )
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, needs.target.layout.layers)


def test_where_the_bytes_go() -> None:
    layout, fixed = LAYOUT, 1000 + 200 + 30 + 7
    every = plan_memory(SMALL, 10**9, 0)  # everything resident asks nothing of the host
    assert (every.resident_layers, every.host_bytes, every.device_bytes) == (
        4,
        0,
        fixed + layout.bytes(3000),
    )
    part = plan_memory(SMALL, 10**9, 10**9, resident_layers=1)
    assert part.host_bytes == layout.bytes(3000, 3)
    views = plan_memory(without_copies(SMALL), 10**9, 10**9, resident_layers=1)
    # no ring and no stage
    assert views.device_bytes == fixed + layout.bytes(3000, 1) + layout.bytes(TAIL, 3)
    assert part.device_bytes > views.device_bytes


@pytest.mark.parametrize("resident", range(5))
# of 3 heads the ring is larger than a layer, of 80 smaller
@pytest.mark.parametrize("heads", [3, 80])
@pytest.mark.parametrize("deferred", [0, 2])
def test_the_plan_covers_what_the_cache_allocates(resident: int, heads: int, deferred: int) -> None:
    link, layout = EmulatedLink(CPU, 1e12), replace(LAYOUT, heads=heads)
    deferred = min(deferred, resident) if resident < layout.layers else 0
    shape = TieredCacheSpec.with_ring(layout, CONTEXT, *SIZES, copies=True)
    hidden = deferred * layout.bytes(CONTEXT, 1)
    needs = MemoryRequirements(shape, retrieval=0, draft=0, tables=0, hidden=hidden)
    room = sum(device_breakdown(needs, resident, deferred)[0].values())
    plan = plan_memory(needs, room, 10**9, resident)
    assert plan.deferred_layers == deferred
    arena = HostArena(link, torch.float32)
    rotary = random_rotary(layout, 8)
    cache = TieredCache(shape.with_placement(resident, deferred), link, rotary, arena)
    with Prefill(cache, 3000):  # the hidden states, the ring and the layer that prefill works on
        assert cache.device_bytes + needs.hidden == room
    cache.onload_deferred()
    assert (
        cache.device_bytes
        == sum(device_breakdown(needs, resident, deferred)[1].values())
        <= plan.device_bytes
    )
    assert arena.nbytes == plan.host_bytes
    link.close()


@pytest.mark.parametrize("needs", [NEEDS, replace(SMALL, hidden=3 * LAYER)])
def test_what_hidden_states_took_goes_to_late_layers(needs: MemoryRequirements) -> None:
    """No device memory is left that one more layer would fit in when decoding; and no host memory
    is asked for beyond what it takes to keep all but the layers that fit beside the hidden states.
    """
    layers, seen = needs.target.layout.layers, set()
    fixed = plan_memory(needs, 10**15, 10**15, 0).device_bytes
    for share in range(1, 50):
        room = fixed + share * needs.target.layout.bytes(needs.target.capacity) // 50
        plan = plan_memory(needs, room, 10**15)
        seen.add(plan.deferred_layers)
        in_prefill, decoding = (
            sum(tiers.values())
            for tiers in device_breakdown(needs, plan.resident_layers, plan.deferred_layers)
        )
        assert max(in_prefill, decoding) == plan.device_bytes <= room
        # hidden states as if they stayed
        early = plan_memory(replace(needs, hidden=0), room - needs.hidden, 10**15)
        assert early.resident_layers <= plan.resident_layers
        assert early.host_bytes >= plan.host_bytes
        assert plan.host_bytes == needs.target.layout.bytes(
            needs.target.capacity, layers - plan.resident_layers + plan.deferred_layers
        )
        if plan.resident_layers < layers - 1:
            assert sum(device_breakdown(needs, plan.resident_layers + 1)[1].values()) > room
        if plan.deferred_layers:
            assert (
                sum(
                    device_breakdown(needs, plan.resident_layers, plan.deferred_layers - 1)[
                        0
                    ].values()
                )
                > room
            )
    assert min(seen) == 0 < max(seen)


def test_without_far_layers_or_a_link_that_copies_none_comes_late() -> None:
    roomy = replace(SMALL, hidden=2 * LAYER)
    views = without_copies(roomy)
    least = plan_memory(views, 10**9, 10**15, 0).device_bytes
    found = [
        plan_memory(views, least + share * LAYOUT.bytes(3000) // 20, 10**15) for share in range(21)
    ]
    assert {plan.deferred_layers for plan in found} == {0}
    assert {plan.resident_layers for plan in found} == {0, 1, 2, 3, 4}
    # all layers at once have no ring to come through
    with pytest.raises(InsufficientMemoryError, match="fewer `gpu_kv_layers`"):
        plan_memory(roomy, LAYOUT.bytes(3000) + 5000, 10**15, resident_layers=4)


def test_resident_layers_can_be_set() -> None:
    for count in range(33):
        assert plan_memory(NEEDS, 10**15, 10**15, resident_layers=count).resident_layers == count
    with pytest.raises(InsufficientMemoryError, match="fewer `gpu_kv_layers`"):
        plan_memory(NEEDS, 24 * GB, 10**15, resident_layers=32)
    for count in (-1, 33):
        with pytest.raises(
            InsufficientMemoryError,
            match=f"`gpu_kv_layers` {count} is not between 0 and the model's 32 layers",
        ):
            plan_memory(NEEDS, 10**15, 10**15, resident_layers=count)


def test_errors_say_what_is_needed_and_available() -> None:
    least = plan_memory(NEEDS, 10**15, 10**15, resident_layers=0).device_bytes
    with pytest.raises(
        InsufficientMemoryError,
        match=rf"needs {least / 1e9:.3f} GB of device memory .* and 1\.500 GB are available",
    ):
        plan_memory(NEEDS, 3 * GB // 2, 10**15)
    with pytest.raises(InsufficientMemoryError, match=r"0\.000 GB are available"):
        plan_memory(NEEDS, -GB, 10**15)  # the weights alone are too much
    host = LLAMA_7B.bytes(130_048)
    with pytest.raises(
        InsufficientMemoryError,
        match=rf"130048 tokens needs {host / 1e9:.2f} GB of host memory per rank and 20\.00 GB are",
    ):
        plan_memory(NEEDS, least, 20 * GB)


def test_llama_7b_on_a_24_gb_card() -> None:
    """The design's own sums: 13.5 GB of weights over two ranks, 1.065 GB of KV a layer, of which 12
    layers and more stay.
    """
    assert LLAMA_7B.bytes(130_048, 1) == 1_065_353_216
    plan = plan_memory(NEEDS, int(23.5 * GB - 6.74 * GB), 64 * GB)
    assert 12 <= plan.resident_layers <= 14
    assert isinstance(plan, MemoryPlan)


def test_what_hidden_states_took_goes_to_codes() -> None:
    """No layer more would have codes when decoding, and no layer less would come late."""
    layout = replace(LAYOUT, heads=80, layers=8, dtype=torch.bfloat16)
    shape = TieredCacheSpec.with_ring(layout, CONTEXT, *SIZES, copies=True)
    hidden = 2 * layout.bytes(CONTEXT, 1)
    needs = MemoryRequirements(shape, retrieval=0, draft=0, tables=0, hidden=hidden, splitting=True)

    def takes(resident: int, deferred: int, split: int) -> list[int]:
        phases = device_breakdown(needs, resident, deferred, split)
        return [sum(tiers.values()) for tiers in phases]

    def fits(resident: int, split: int) -> bool:
        near = resident + split
        return any(max(takes(resident, deferred, split)) <= room for deferred in range(near + 1))

    least, most = max(takes(0, 0, 0)), max(takes(8, 0, 0))
    seen = set()
    for share in range(101):
        room = least + share * (most - least) // 100
        plan = plan_memory(needs, room, 10**12)
        resident, deferred, split = plan.resident_layers, plan.deferred_layers, plan.split_layers
        seen.add((resident > 0, 0 < deferred <= resident, deferred > resident))
        assert max(takes(resident, deferred, split)) == plan.device_bytes <= room
        if deferred:
            assert takes(resident, deferred - 1, split)[0] > room
        if resident + split < 8:
            assert not resident
            assert not fits(0, split + 1)
        elif split > 0:
            assert not fits(resident + 1, split - 1)
    assert (False, False, True) in seen  # codes alone, of which some come late
    assert (True, False, True) in seen  # all resident layers come late, and codes
    assert (True, True, False) in seen
    with pytest.raises(
        InsufficientMemoryError, match=r"fewer `gpu_kv_layers`, fewer `split_kv_layers`, a"
    ):
        plan_memory(needs, least // 2, 10**9, 4, 4)


@pytest.mark.parametrize("context", [1, 1000, 4096, 130_048, 2_000_000])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_ring(context: int, heads: int) -> None:
    layout = KVLayout(2, heads, 128, torch.float16)
    shape = TieredCacheSpec.with_ring(layout, context, 0, 1, 1, copies=True)
    slot_heads, slots, head = shape.slot_heads, shape.slots, 2 * context * 128 * 2
    size = slots * slot_heads * head
    assert 1 <= slot_heads <= heads
    assert slots >= 2
    assert shape.ring_numel * 2 == max(size, layout.bytes(context, 1))
    assert size <= max(2**30, layout.bytes(context, 1)) or slots == 2
    # keys and values 2 MB each, unless the layer is smaller
    assert slot_heads == heads or slot_heads * head >= 4 << 20
