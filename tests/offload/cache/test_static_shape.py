"""Short forwards in static shapes give the same outputs as others, at any length."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.cache.static_forward import Place, StaticForward
from offload.cache.static_shape import StaticCache
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from support.driving import (
    BLOCK,
    CAPACITY,
    LAYOUT,
    QKV,
    RECENT,
    cache_pair,
    concat,
    first_tokens,
    forward,
    prefill,
    random_qkv,
    speculate,
)
from support.links import CPU, make_test_link
from support.reference import random_rotary
from support.slow import slow_except

DRAFT, ROWS = 6, 5
SHAPE = RetrievalCacheSpec(48, 4, RECENT, BLOCK, CAPACITY, DRAFT + 1, CAPACITY)


class StaticForwards:
    """The static forwards of a cache, of up to `rows` tokens, for the cache's lifetime."""

    def __init__(self, cache: StaticCache, rows: int = ROWS):
        self.static, self.rows = StaticForward([cache], rows), rows
        self.counts: set[int] = set()  # numbers of tokens

    def forward(self, tokens: list[QKV]) -> Tensor:
        count = len(tokens[0][0])
        self.counts.add(count)
        out = self.forward_at(Place.after(self.static.caches[0], count), tokens)
        return out[:, :count]

    def forward_at(self, place: Place, tokens: list[QKV]) -> Tensor:
        self.static.place(0, place)
        self.static.begin_forward(self.rows)
        padded = concat(tokens, random_qkv(self.rows - len(tokens[0][0])))
        parts = [self.static.attend(layer, *qkv, 0) for layer, qkv in enumerate(padded)]
        return torch.stack([out for out, _ in parts])


def assert_same(
    cache: StaticCache, static: StaticForwards, tokens: list[QKV], expected: Tensor
) -> None:
    """Assert that a static forward repeats the output and the KV of the forward just made.

    Only the slot for padding differs.
    """
    slot, _ = cache.slot_and_position(cache.length)
    slot -= cache.window_offset
    rows = slice(slot, slot + len(tokens[0][0]))
    before = []
    for layer in range(LAYOUT.layers):
        kv, raw, *_ = cache.buffers(layer)
        before.append((kv.clone(), None if raw is None else raw.clone()))
        kv[:, :, rows] = 7.0  # unwritten slots become visible
        if raw is not None:
            raw[:, rows] = 7.0
    torch.testing.assert_close(static.forward(tokens), expected, atol=1e-5, rtol=1e-5)
    for layer, saved in enumerate(before):
        for actual, expected_buffer in zip(cache.buffers(layer)[:2], saved, strict=True):
            assert (actual is None) == (expected_buffer is None)
            if actual is not None and expected_buffer is not None:
                slots = slice(cache.slots - cache.window_offset)
                actual, expected_buffer = actual[..., slots, :], expected_buffer[..., slots, :]
                torch.testing.assert_close(actual, expected_buffer, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("policy", slow_except(POLICIES, -1))
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("start", [5, 40, 70])  # no prefix, within the budget, past it
def test_static_forwards_equal_others_on_a_retrieval_cache(
    start: int, chunk: int, policy: str, quantised: bool
) -> None:
    shape = replace(SHAPE, chunk=chunk, quantised=quantised)
    rng = random.Random(start)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy)
    static = StaticForwards(middle)
    sequence = random_qkv(start)
    prefill(target, sequence, 32)

    def check(known: list[QKV], out: Tensor) -> None:
        tokens = [tuple(x[-out.shape[1] :] for x in qkv) for qkv in known]
        assert_same(middle, static, tokens, out)

    for _ in range(12):
        sequence, _ = speculate(target, middle, sequence, DRAFT, rng, check)
    assert target.boundary > start
    assert static.counts == {1, 2, 3}


def test_static_forwards_equal_others_on_a_streaming_cache() -> None:
    cache = StreamingCache(LAYOUT, StreamingCacheSpec(3, 16, 8), random_rotary(LAYOUT, 27), CPU)
    static = StaticForwards(cache)
    rng = random.Random(0)
    while cache.length < 100:
        tokens = random_qkv(rng.randint(1, 5))
        assert_same(cache, static, tokens, forward(cache, tokens))
        cache.advance(len(tokens[0][0]))
        cache.crop(cache.length - rng.randint(0, 1))
    assert cache._dropped > 27


def test_a_forward_past_the_buffer_is_an_error() -> None:
    target, middle = cache_pair(make_test_link("view"), 2, replace(SHAPE, append_room=0, rows=1))
    prefill(target, random_qkv(70), 32)
    room = middle.slots - middle.slot_and_position(middle.length)[0]
    StaticForwards(middle, room).forward(random_qkv(room))
    with pytest.raises(ValueError, match=f"do not fit a buffer of {middle.slots}"):
        StaticForwards(middle, room + 1).forward(random_qkv(room + 1))


@pytest.mark.parametrize("quantised", [False, True])
def test_padding_alone_leaves_the_cache_as_it_is(quantised: bool) -> None:
    target, middle = cache_pair(make_test_link("view"), 2, replace(SHAPE, quantised=quantised))
    prefill(target, random_qkv(70), 32)
    slots = slice(middle.slots - middle.window_offset)
    before = [middle.buffers(layer)[0][:, :, slots].clone() for layer in range(LAYOUT.layers)]
    out = StaticForwards(middle).forward_at(Place(0), random_qkv(0))
    assert out.isfinite().all()
    for layer, saved in enumerate(before):
        assert torch.equal(middle.buffers(layer)[0][:, :, slots], saved)
    assert (middle.length, middle.traffic.attended) == (70, 0)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_restored_cache_keeps_its_addresses(quantised: bool) -> None:
    target, middle = cache_pair(make_test_link("view"), 2, replace(SHAPE, quantised=quantised))
    prefill(target, random_qkv(70), 32)
    addresses = [x.data_ptr() for x in middle.buffers(1) if x is not None]
    static = StaticForwards(middle)
    tokens = random_qkv(2)
    state = middle.snapshot()
    expected = static.forward(tokens)
    static.forward(concat(random_qkv(1), first_tokens(tokens, 1)))
    middle.restore(state)
    assert addresses == [x.data_ptr() for x in middle.buffers(1) if x is not None]
    assert torch.equal(static.forward(tokens), expected)
