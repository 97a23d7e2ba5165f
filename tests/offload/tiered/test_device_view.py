"""Drafting from the target's on-device KV leaves the target unchanged."""

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
from support.driving import LAYOUT, forward, prefill, random_qkv, tiered_cache
from support.links import every_link, make_test_link, worst_link
from support.slow import slow_except

LAYOUT_16 = replace(LAYOUT, dtype=torch.bfloat16)
SHAPE = RetrievalCacheSpec(
    budget=40, chunk=4, window=8, block=12, context=400, rows=12, append_room=200
)


def make_target(link: Link, split: int) -> TieredCache:
    """Return a cache with one resident layer and three offloaded ones, some of them split."""
    return tiered_cache(
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


def make_device_view(target: TieredCache, quantised: bool = False) -> OnDeviceCache:
    """Return the device view of a target, with a retrieval cache for layers that are not on it."""
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
def test_drafting_does_not_change_the_target(link: Link, split: int, quantised: bool) -> None:
    rng = random.Random(split)
    target, reference = make_target(link, split), make_target(link, split)
    reference.rotary = target.rotary
    device_view = make_device_view(target, quantised)
    prompt = random_qkv(90, LAYOUT_16)
    assert torch.equal(prefill(target, prompt, 32), prefill(reference, prompt, 32))
    for _ in range(25):
        assert device_view.length == target.length
        drafted = rng.randint(1, SHAPE.rows)
        while device_view.length < target.length + drafted:  # some tokens are dropped at once
            rows = rng.randint(1, target.length + drafted - device_view.length)
            forward(device_view, random_qkv(rows, LAYOUT_16))
            device_view.advance(rows)
            device_view.crop(device_view.length - rng.randint(0, rows - 1))
        tokens = random_qkv(drafted, LAYOUT_16)
        assert torch.equal(forward(target, tokens), forward(reference, tokens))
        accepted = rng.randint(1, drafted)
        target.advance(accepted)
        reference.advance(accepted)
    assert target.boundary > 150


@every_link
def test_device_attention_approximates_the_target_without_transfers(link: Link) -> None:
    target = make_target(link, 3)
    device_view = make_device_view(target)
    prefill(target, random_qkv(90, LAYOUT_16), 32)
    tokens = random_qkv(5, LAYOUT_16)
    before = target.traffic.snapshot()
    actual = forward(device_view, tokens).float()
    assert target.traffic.snapshot() == before
    assert device_view.traffic.attended > 0
    expected = forward(target, tokens).float()
    error = (actual - expected).abs().amax((1, 2, 3))
    assert error[0] < 1e-2  # resident
    assert 1e-3 < error[1:].max() < 0.2


def test_prefix_tokens_cannot_be_cropped() -> None:
    target = make_target(make_test_link("view"), 3)
    device_view = make_device_view(target)
    prefill(target, random_qkv(90, LAYOUT_16), 32)
    with pytest.raises(ValueError, match="the first 72 are before the offload boundary"):
        device_view.crop(71)
