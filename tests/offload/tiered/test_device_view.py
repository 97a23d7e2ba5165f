"""Drafting on what the device has of the target's cache leaves nothing behind in it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from offload.memory.link import Link
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.device_view import OnDeviceCache
from support.driving import LAYOUT, forward, prefill, text, tiered
from support.links import every_link, make_test_link, worst_link
from support.slow import slow_except

LAYOUT_16 = replace(LAYOUT, dtype=torch.bfloat16)
SHAPE = RetrievalCacheSpec(
    budget=40, chunk=4, window=8, block=12, context=400, rows=12, append_room=200
)


def target_of(link: Link, split: int) -> TieredCache:
    """One resident layer, and of three far ones some with codes on the device."""
    return tiered(
        link,
        resident=1,
        split=split,
        compressed=True,
        layout=LAYOUT_16,
        capacity=SHAPE.context,
        recent=SHAPE.window,
        block=SHAPE.block,
        rows=2 * SHAPE.rows,
    )


def near_of(target: TieredCache, quantised: bool = False) -> OnDeviceCache:
    """What the device has of a target; a retrieval cache of the layers without codes."""
    layers = [index for index, layer in enumerate(target.layers) if not layer.is_on_device]
    retrieval = None
    if layers:
        policy, device = POLICIES["attention"](), target.link.device
        rotary = target.rotary
        shape = replace(SHAPE, quantised=quantised)
        retrieval = RetrievalCache(LAYOUT_16, shape, policy, rotary, device, 1, layers)
        target.observers.append(retrieval)
    return OnDeviceCache(target, retrieval)


@worst_link
@pytest.mark.parametrize("quantised", slow_except([False, True], 1))
@pytest.mark.parametrize("split", [3, 1, 0])
def test_what_is_drafted_changes_nothing_of_the_target(
    link: Link, split: int, quantised: bool
) -> None:
    rng = random.Random(split)
    target, alone = target_of(link, split), target_of(link, split)
    alone.rotary = target.rotary
    near = near_of(target, quantised)
    prompt = text(90, LAYOUT_16)
    assert torch.equal(prefill(target, prompt, 32), prefill(alone, prompt, 32))
    for _ in range(25):
        assert near.length == target.length
        drafted = rng.randint(1, SHAPE.rows)
        while near.length < target.length + drafted:  # some of it is taken back at once
            rows = rng.randint(1, target.length + drafted - near.length)
            forward(near, text(rows, LAYOUT_16))
            near.advance(rows)
            near.crop(near.length - rng.randint(0, rows - 1))
        tokens = text(drafted, LAYOUT_16)
        assert torch.equal(forward(target, tokens), forward(alone, tokens))
        stand = rng.randint(1, drafted)
        target.advance(stand)
        alone.advance(stand)
    assert target.boundary > 150


@every_link
def test_what_is_near_attends_nearly_as_the_target_and_costs_no_link(link: Link) -> None:
    target = target_of(link, 3)
    near = near_of(target)
    prefill(target, text(90, LAYOUT_16), 32)
    tokens = text(5, LAYOUT_16)
    before = target.traffic.snapshot()
    found = forward(near, tokens).float()
    assert target.traffic.snapshot() == before
    assert near.traffic.attended > 0
    wanted = forward(target, tokens).float()
    error = (found - wanted).abs().amax((1, 2, 3))
    assert error[0] < 1e-2  # resident
    assert 1e-3 < error[1:].max() < 0.2


def test_tokens_with_codes_are_not_taken_back() -> None:
    target = target_of(make_test_link("view"), 3)
    near = near_of(target)
    prefill(target, text(90, LAYOUT_16), 32)
    with pytest.raises(ValueError, match="the first 72 have codes"):
        near.crop(71)
