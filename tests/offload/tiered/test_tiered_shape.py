"""A cache allocates what its spec counts, for any sizes and any link."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.cache.base import Cache
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.codec.format import compression_saves, split_format
from offload.layout import KVLayout
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.prefill.layer_major import Prefill
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from support.links import CPU, make_test_link
from support.reference import random_rotary

every_link = pytest.mark.parametrize("link", ["view", "emulated"], indirect=True)
SHARED_ATTRIBUTES = ("link", "rotary", "observers", "traffic", "host")


def buffer_sizes(root: Any, sizes: dict[int, int]) -> dict[int, int]:
    """Return the bytes of every buffer reachable from one of our objects, by address."""
    if isinstance(root, Tensor):
        storage = root.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    elif isinstance(root, list | tuple | deque):
        for item in root:
            buffer_sizes(item, sizes)
    elif type(root).__module__.startswith("offload."):
        for name, value in getattr(root, "__dict__", {}).items():
            if name.strip("_") not in SHARED_ATTRIBUTES:
                buffer_sizes(value, sizes)
    return sizes


def allocated(cache: Cache) -> int:
    return sum(buffer_sizes(cache, {}).values())


def random_layout(rng: random.Random) -> KVLayout:
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    return KVLayout(rng.randint(1, 6), rng.randint(1, 5), rng.choice([2, 8, 16]), dtype)


def random_spec(rng: random.Random, copies: bool) -> TieredCacheSpec:
    sizes = [rng.randint(1, 300), rng.randint(0, 9), rng.randint(1, 40), rng.randint(1, 20)]
    shape = TieredCacheSpec.with_ring(random_layout(rng), *sizes, copies=copies)
    resident = rng.randint(0, shape.layout.layers)
    shape = shape.with_placement(resident)
    split = 0
    if split_format(shape.layout.dtype) is not None:
        split = rng.randint(0, shape.offloaded_layers)
        shape = replace(shape, compressed=rng.random() < 0.5)
    deferred = rng.randint(0, resident + split) if shape.streams else 0
    return shape.with_placement(resident, deferred, split)


def device_bytes(shape: TieredCacheSpec, prefill: bool) -> int:
    return sum(shape.device_breakdown(prefill).values())


@every_link
def test_tiered_caches_allocate_what_their_spec_counts(link: Link) -> None:
    rng = random.Random(0)
    for _ in range(60):
        shape = random_spec(rng, link.copies)
        arena = HostArena(link, shape.layout.dtype)
        cache = TieredCache(shape, link, random_rotary(shape.layout, shape.capacity), arena)
        assert allocated(cache) == cache.device_bytes == device_bytes(shape, prefill=True)
        with Prefill(cache, rng.randint(1, shape.capacity)):
            assert allocated(cache) == device_bytes(shape, prefill=True)
        cache.onload_deferred()
        assert allocated(cache) == cache.device_bytes == device_bytes(shape, prefill=False)
        assert arena.nbytes == shape.host_bytes


def test_compression_saves_what_the_spec_counts() -> None:
    rng = random.Random(0)
    outcomes = set()
    for _ in range(200):
        shape = random_spec(rng, copies=True)
        if split_format(shape.layout.dtype) is None:
            assert not compression_saves(shape.layout.dtype)
            continue
        whole, compressed = (replace(shape, compressed=each) for each in (False, True))
        saves = compression_saves(shape.layout.dtype) and shape.streamed_layers > 0
        assert (compressed.host_bytes < whole.host_bytes) == saves
        outcomes.add(saves)
    assert outcomes == {False, True}


def test_a_spec_for_another_kind_of_link_is_an_error() -> None:
    rng = random.Random(0)
    shape = random_spec(rng, copies=True)
    link = make_test_link("view")
    rotary = random_rotary(shape.layout, shape.capacity)
    with pytest.raises(ValueError, match="another kind of link"):
        TieredCache(shape, link, rotary, HostArena(link, shape.layout.dtype))


def test_retrieval_caches_allocate_what_their_spec_counts() -> None:
    rng = random.Random(1)
    for _ in range(60):
        layout = random_layout(rng)
        budget = rng.randint(8, 200)
        shape = RetrievalCacheSpec.of(budget, rng.randint(1, 8), rng.randint(1, 900), 7, 20)
        shape = replace(shape, quantised=rng.random() < 0.5)
        policy = POLICIES["attention"]()
        cache = RetrievalCache(layout, shape, policy, random_rotary(layout, 4), CPU)
        assert allocated(cache) == cache.device_bytes == shape.device_bytes(layout)


def test_draft_caches_allocate_what_their_spec_counts() -> None:
    rng = random.Random(2)
    for _ in range(60):
        layout = random_layout(rng)
        shape = StreamingCacheSpec(*(rng.randint(1, 40) for _ in range(3)))
        cache = StreamingCache(layout, shape, random_rotary(layout, 4), CPU)
        assert allocated(cache) == cache.device_bytes == shape.device_bytes(layout)
