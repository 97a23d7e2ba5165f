"""Short passes in fixed shapes give what others give, wherever the text stands."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.cache.static_shape import StaticCache, StaticForward
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

DRAFT = 6
SHAPE = RetrievalCacheSpec(48, 4, RECENT, BLOCK, CAPACITY, DRAFT + 1, CAPACITY)


class Fixed:
    """The fixed passes of a cache, one for each number of rows, for as long as the cache lives."""

    def __init__(self, cache: StaticCache):
        self.cache = cache
        self.passes: dict[int, StaticForward] = {}

    def forward(self, tokens: list[QKV]) -> Tensor:
        rows = len(tokens[0][0])
        fixed = self.passes.setdefault(rows, StaticForward(self.cache, rows))
        fixed.prepare()
        fixed.begin_forward(rows)
        return torch.stack(
            [fixed.attend(layer, *qkv, fixed.length) for layer, qkv in enumerate(tokens)]
        )


def same(cache: StaticCache, fixed: Fixed, tokens: list[QKV], wanted: Tensor) -> None:
    """Right after a pass as it is: the fixed pass gives the same, and leaves the same behind."""
    slot, _ = cache.slot_and_position(cache.length)
    slot -= cache.window_offset
    rows, left = slice(slot, slot + len(tokens[0][0])), []
    for layer in range(LAYOUT.layers):
        kv, raw = cache.buffers(layer)
        left.append((kv.clone(), None if raw is None else raw.clone()))
        kv[:, :, rows] = 7.0  # what is not written shows
        if raw is not None:
            raw[:, rows] = 7.0
    torch.testing.assert_close(fixed.forward(tokens), wanted, atol=1e-5, rtol=1e-5)
    for layer, kept in enumerate(left):
        for found, was in zip(cache.buffers(layer), kept, strict=True):
            assert (found is None) == (was is None)
            if found is not None and was is not None:
                torch.testing.assert_close(found, was, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("policy", slow_except(POLICIES, -1))
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("start", [5, 40, 70])  # no prefix, within the budget, past it
def test_on_a_retrieval_cache(start: int, chunk: int, policy: str, quantised: bool) -> None:
    shape, rng = replace(SHAPE, chunk=chunk, quantised=quantised), random.Random(start)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy)
    fixed, sequence = Fixed(middle), random_qkv(start)
    prefill(target, sequence, 32)

    def check(known: list[QKV], out: Tensor) -> None:
        tokens = [tuple(x[-out.shape[1] :] for x in qkv) for qkv in known]
        same(middle, fixed, tokens, out)

    for _ in range(12):
        sequence, _ = speculate(target, middle, sequence, DRAFT, rng, check)
    assert target.boundary > start
    assert set(fixed.passes) == {1, 2, 3}


def test_on_a_streaming_cache_that_slides_and_takes_back() -> None:
    cache = StreamingCache(LAYOUT, StreamingCacheSpec(3, 16, 8), random_rotary(LAYOUT, 27), CPU)
    fixed, rng = Fixed(cache), random.Random(0)
    while cache.length < 100:
        tokens = random_qkv(rng.randint(1, 5))
        same(cache, fixed, tokens, forward(cache, tokens))
        cache.advance(len(tokens[0][0]))
        cache.crop(cache.length - rng.randint(0, 1))
    assert cache._dropped > 27


def test_a_pass_past_the_buffer_is_refused() -> None:
    target, middle = cache_pair(make_test_link("view"), 2, replace(SHAPE, append_room=0, rows=1))
    prefill(target, random_qkv(70), 32)
    room = middle.slots - middle.slot_and_position(middle.length)[0]
    Fixed(middle).forward(random_qkv(room))
    with pytest.raises(ValueError, match=f"do not fit a buffer of {middle.slots}"):
        Fixed(middle).forward(random_qkv(room + 1))


@pytest.mark.parametrize("quantised", [False, True])
def test_a_rewound_cache_keeps_its_addresses(quantised: bool) -> None:
    target, middle = cache_pair(make_test_link("view"), 2, replace(SHAPE, quantised=quantised))
    prefill(target, random_qkv(70), 32)
    places = [x.data_ptr() for x in middle.buffers(1) if x is not None]
    fixed, tokens, state = Fixed(middle), random_qkv(2), middle.snapshot()
    wanted = fixed.forward(tokens)
    fixed.forward(concat(random_qkv(1), first_tokens(tokens, 1)))
    middle.restore(state)
    assert places == [x.data_ptr() for x in middle.buffers(1) if x is not None]
    assert torch.equal(fixed.forward(tokens), wanted)
