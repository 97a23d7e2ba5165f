"""Every cache's attention comes with its log-sum-exp, to which attention sinks are added.

Queries of zeros make all scores zero: the log-sum-exp is the logarithm of the number of tokens that
a query sees.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.cache.base import Cache
from offload.cache.static_forward import Place, StaticForward
from offload.cache.static_shape import StaticCache
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.layout import KVLayout, SlidingWindow
from offload.memory.link import Link
from offload.prefill.layer_major import Prefill
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.device_view import OnDeviceCache
from support.driving import (
    BFLOAT16,
    LAYOUT,
    attended,
    cache_pair,
    prefill,
    random_qkv,
    tiered_cache,
)
from support.links import CPU, make_test_link
from support.reference import random_rotary

ROWS = 3


def log_counts(layout: KVLayout, end: int, rows: int) -> Tensor:
    """Return the expected (L, rows, 1) for the last rows of `end` tokens."""
    seen = torch.arange(end - rows, end) + 1
    layers = []
    for layer in range(layout.layers):
        window = layout.window_of(layer)
        layers.append(seen if window is None else seen.clamp(max=window))
    return torch.stack(layers).float().log()[..., None]


def zero_queries(rows: int, layout: KVLayout = LAYOUT) -> list[tuple[Tensor, ...]]:
    return [(q.zero_(), k, v) for q, k, v in random_qkv(rows, layout)]


def check(cache: Cache, expected: Tensor) -> None:
    _, lse = attended(cache, zero_queries(ROWS, cache.layout))
    torch.testing.assert_close(lse, expected.expand_as(lse), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("link", ["view", "emulated"], indirect=True)
def test_tiers(link: Link, split: int, deterministic: bool) -> None:
    """One layer is on the device; of the others one is split, or another has a window."""
    window = SlidingWindow(9, frozenset({1}))
    layout = BFLOAT16 if split else replace(LAYOUT, window=window)
    cache = tiered_cache(link, 1, split=split, layout=layout, batch_invariant=deterministic)
    tokens = zero_queries(70, layout)
    with Prefill(cache, 70) as context:
        for layer, qkv in enumerate(tokens):
            _, lse = context.attend(layer, *qkv, 0)
            expected = log_counts(layout, 70, 70)[layer].expand_as(lse)
            torch.testing.assert_close(lse, expected, atol=1e-4, rtol=1e-4)
    check(cache, log_counts(layout, 70 + ROWS, ROWS))


def check_static(cache: StaticCache, expected: Tensor) -> None:
    static = StaticForward([cache], ROWS)
    static.place(0, Place.after(cache, ROWS))
    static.begin_forward(ROWS)
    for layer, (qkv, own) in enumerate(zip(zero_queries(ROWS), expected, strict=True)):
        _, lse = static.attend(layer, *qkv, 0)
        torch.testing.assert_close(lse, own.expand_as(lse), atol=1e-4, rtol=1e-4)


def test_retrieval() -> None:
    """A budget for everything, so that nothing is left out."""
    shape = RetrievalCacheSpec.of(128, 4, 90, 8, 8)
    target, middle = cache_pair(make_test_link("view"), 1, shape)
    view = OnDeviceCache(target, middle)
    prefill(target, random_qkv(70), 32)
    expected = log_counts(LAYOUT, 70 + ROWS, ROWS)
    check(middle, expected)
    check_static(middle, expected)
    check(view, expected)


def test_streaming() -> None:
    spec = StreamingCacheSpec(4, 64, 16)
    cache = StreamingCache(LAYOUT, spec, random_rotary(LAYOUT, spec.slots), CPU)
    attended(cache, random_qkv(50))
    cache.advance(50)
    expected = log_counts(LAYOUT, 50 + ROWS, ROWS)
    check(cache, expected)
    check_static(cache, expected)
