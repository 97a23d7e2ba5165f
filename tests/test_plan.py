"""The memory plan: as many resident layers as fit, sums that hold against the caches themselves, and errors with figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from links import CPU
from reference import random_rotary

from offload import EmulatedLink, FitError, HostArena, KVLayout, MemoryPlan, Needs, TieredCache, plan_memory, tail_tokens
from offload.plan import ring_shape

GB = 10**9
SIZES = 5, 12, 7  # recent tokens, a block, the rows of a pass
TAIL = tail_tokens(*SIZES)
LLAMA_7B = KVLayout(layers=32, heads=16, head_dim=128, dtype=torch.float16)  # a rank of two
NEEDS = Needs(LLAMA_7B, context=130_048, tail=256, retrieval=GB // 2, draft=GB // 10, tables=GB // 20, hidden=GB)
SMALL = Needs(KVLayout(4, 3, 8, torch.float32), context=3000, tail=TAIL, retrieval=1000, draft=200, tables=30, hidden=7)


@pytest.mark.parametrize("needs", [NEEDS, SMALL, replace(SMALL, copies=False)])
def test_more_device_memory_never_means_fewer_resident_layers(needs: Needs) -> None:
    everything = needs.layout.bytes(needs.context) + needs.retrieval + needs.draft + needs.tables + needs.hidden
    counts, least = [], plan_memory(needs, 10**15, 10**15, resident_layers=0).device_bytes
    for step in range(101):
        device = least + (everything - least) * step // 100
        plan = plan_memory(needs, device, 10**15)
        assert plan.device_bytes <= device
        counts.append(plan.resident_layers)
        if plan.resident_layers < needs.layout.layers:  # one more would not have fitted
            assert plan_memory(needs, 10**15, 10**15, plan.resident_layers + 1).device_bytes > device
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, needs.layout.layers)


def test_where_the_bytes_go() -> None:
    layout, fixed = SMALL.layout, 1000 + 200 + 30 + 7
    every = plan_memory(SMALL, 10**9, 0)  # everything resident asks nothing of the host
    assert (every.resident_layers, every.host_bytes, every.device_bytes) == (4, 0, fixed + layout.bytes(3000))
    part = plan_memory(SMALL, 10**9, 10**9, resident_layers=1)
    assert part.host_bytes == layout.bytes(3000, 3)
    views = plan_memory(replace(SMALL, copies=False), 10**9, 10**9, resident_layers=1)
    assert views.device_bytes == fixed + layout.bytes(3000, 1) + layout.bytes(TAIL, 3)  # no ring and no stage
    assert part.device_bytes > views.device_bytes


@pytest.mark.parametrize("resident", range(5))
@pytest.mark.parametrize("heads", [3, 80])  # of 3 heads the ring is larger than a layer, of 80 smaller
def test_the_plan_covers_what_the_cache_allocates(resident: int, heads: int) -> None:
    link, layout = EmulatedLink(CPU, 1e12), replace(SMALL.layout, heads=heads)
    needs = replace(SMALL, layout=layout, retrieval=0, draft=0, tables=0, hidden=0)
    plan = plan_memory(needs, 10**9, 10**9, resident)
    arena = HostArena(link, torch.float32)
    rotary = random_rotary(layout, 8)
    cache = TieredCache(layout, 3000, resident, link, rotary, arena, *SIZES, plan.slot_heads, plan.slots)
    with cache.prefill(3000):  # the most there ever is: the ring and the layer that prefill works on
        assert cache.device_bytes == plan.device_bytes
    assert cache.device_bytes <= plan.device_bytes
    assert arena.nbytes == plan.host_bytes
    link.close()


def test_resident_layers_can_be_set() -> None:
    for count in range(33):
        assert plan_memory(NEEDS, 10**15, 10**15, resident_layers=count).resident_layers == count
    with pytest.raises(FitError, match="fewer --resident-layers"):
        plan_memory(NEEDS, 24 * GB, 10**15, resident_layers=32)
    for count in (-1, 33):
        with pytest.raises(FitError, match=f"--resident-layers {count} is not between 0 and the model's 32 layers"):
            plan_memory(NEEDS, 10**15, 10**15, resident_layers=count)


def test_errors_say_what_is_needed_and_available() -> None:
    least = plan_memory(NEEDS, 10**15, 10**15, resident_layers=0).device_bytes
    with pytest.raises(FitError, match=rf"needs {least / 1e9:.3f} GB of device memory .* and 1\.500 GB are available"):
        plan_memory(NEEDS, 3 * GB // 2, 10**15)
    with pytest.raises(FitError, match=r"0\.000 GB are available"):
        plan_memory(NEEDS, -GB, 10**15)  # the weights alone are too much
    host = LLAMA_7B.bytes(130_048)
    with pytest.raises(FitError, match=rf"130048 tokens needs {host / 1e9:.2f} GB of host memory per rank and 20\.00 GB are"):
        plan_memory(NEEDS, least, 20 * GB)


def test_llama_7b_on_a_24_gb_card() -> None:
    """The design's own sums: 13.5 GB of weights over two ranks, 1.065 GB of KV a layer, of which 12 layers and more stay."""
    assert LLAMA_7B.bytes(130_048, 1) == 1_065_353_216
    plan = plan_memory(NEEDS, int(23.5 * GB - 6.74 * GB), 64 * GB)
    assert 12 <= plan.resident_layers <= 14
    assert isinstance(plan, MemoryPlan)


@pytest.mark.parametrize("context", [1, 1000, 4096, 130_048, 2_000_000])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_ring(context: int, heads: int) -> None:
    layout = KVLayout(2, heads, 128, torch.float16)
    slot_heads, slots, size = ring_shape(layout, context)
    head = 2 * context * 128 * 2
    assert 1 <= slot_heads <= heads
    assert slots >= 2
    assert size == slots * slot_heads * head
    assert size <= 2**30 or (slot_heads, slots) == (1, 2) or slots == 2
    assert slot_heads == heads or slot_heads * head >= 4 << 20  # keys and values 2 MB each, unless the layer is smaller
