"""A layer in slices attends to the very elements that went in, for the fewest bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.memory.link import Link
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from offload.traffic import ByteCounters
from support.driving import CAPACITY, LAYOUT, QKV, SHAPE, forward, prefill, text, tiered
from support.links import every_link
from support.reference import PlainCache
from support.slow import slow_except

every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.bfloat16, torch.float16]), ids=str
)
COPYING = pytest.mark.parametrize("link", ["emulated", "delaying"], indirect=True)
# split layers of the three far ones, whether the others are packed, and heads of a chunk
PLACES = [(0, True, 1), (1, False, 2), (2, True, 3), (3, False, 1), (3, False, 2)]
# rows of a pass, how many of them stand, and where to crop afterwards
PASSES = [(1, 1, None), (17, 12, None), (5, 0, None), (24, 24, None), (2, 2, 33), (9, 9, None)]


def layout_of(dtype: torch.dtype) -> KVLayout:
    return replace(LAYOUT, dtype=dtype)


def split(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, heads: int, deferred: int = 0
) -> TieredCache:
    """One resident layer and three far ones, of which some are in slices."""
    return tiered(
        link,
        1,
        deferred,
        layers,
        layout=layout_of(dtype),
        compressed=compressed,
        slot_heads=heads,
    )


def with_outliers(tokens: list[QKV]) -> list[QKV]:
    """Make some keys and values tiny, huge and zero, more of them than are planned for."""
    for _, k, v in tokens:
        for x in (k, v):
            x[torch.rand(x.shape) < 0.02] *= 1e-6
            x[torch.rand(x.shape) < 0.01] *= 60
            x[torch.rand(x.shape) < 0.01] = 0
    return tokens


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@every_link
@every_dtype
@pytest.mark.parametrize(("layers", "compressed", "heads"), PLACES)
def test_outputs_are_bit_for_bit_those_without_slices(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, heads: int
) -> None:
    check_outputs(link, split(link, dtype, layers, compressed, heads), heads)


@COPYING
@every_dtype
@pytest.mark.parametrize(
    ("layers", "compressed", "deferred"), [(1, False, 2), (3, False, 3), (2, True, 2)]
)
def test_so_they_are_where_codes_come_late(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, deferred: int
) -> None:
    """The resident layer does, too."""
    check_outputs(link, split(link, dtype, layers, compressed, 2, deferred), 2)


def check_outputs(link: Link, cache: TieredCache, heads: int) -> None:
    dtype = cache.layout.dtype
    want = split(link, dtype, 0, False, heads)
    want.rotary = cache.rotary
    prompt = with_outliers(text(70, layout_of(dtype)))
    assert same(prefill(cache, prompt, chunk=16), prefill(want, prompt, chunk=16))
    for rows, stand, crop in PASSES * 2:
        tokens = with_outliers(text(rows, layout_of(dtype)))
        assert same(forward(cache, tokens), forward(want, tokens))
        for each in (cache, want):
            each.advance(stand)
            if crop is not None:
                each.crop(crop)


@every_link
@every_dtype
def test_elements_of_a_whole_text_come_back(link: Link, dtype: torch.dtype) -> None:
    """They are shown to whoever follows a pass."""
    cache = split(link, dtype, 3, False, 2)
    tokens = with_outliers(text(CAPACITY - 1, layout_of(dtype)))
    prefill(cache, tokens, chunk=50)
    link.drain()
    cache.begin_forward(1)
    seen: list[Tensor] = []

    class Follower:
        def on_forward(self, boundary: int, length: int, end: int) -> None: ...

        def on_attention(
            self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
        ) -> None:
            if layer:
                seen.append(prefix.clone())

        def on_advance(self, length: int) -> None: ...

    cache.observers.append(Follower())
    forward(cache, text(1, layout_of(dtype)))
    found = torch.cat([torch.cat(seen[at : at + 2], dim=1) for at in range(0, 6, 2)])
    for layer, (_, k, v) in enumerate(tokens[1:], 1):
        keys = cache.rotary(k, 0, layer)[: cache.boundary].transpose(0, 1)
        assert same(found[2 * layer - 2], keys)
        assert same(found[2 * layer - 1], v[: cache.boundary].transpose(0, 1))


@pytest.mark.parametrize("link", ["emulated"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "layers", "compressed", "share"),
    [
        (torch.bfloat16, 3, False, 4 / 16),
        (torch.bfloat16, 0, True, 12 / 16),
        (torch.bfloat16, 1, True, (4 + 12 + 12) / 48),
        (torch.bfloat16, 1, False, (4 + 16 + 16) / 48),
        (torch.float16, 3, False, 8 / 16),
    ],
)
def test_a_pass_streams_the_bits_that_the_device_lacks(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, share: float
) -> None:
    cache, layout = split(link, dtype, layers, compressed, 2), layout_of(dtype)
    prefill(cache, text(150, layout), chunk=64)
    whole = layout.bytes(cache.boundary, 3)
    assert cache.traffic.link_out == share * whole
    forward(cache, text(3, layout))
    assert cache.traffic.link_in == share * whole
    assert cache.shape.host_bytes == share * layout.bytes(CAPACITY, 3)


@COPYING
@every_dtype
@pytest.mark.parametrize("compressed", [False, True])
def test_codes_that_come_late_cross_the_link_once(
    link: Link, dtype: torch.dtype, compressed: bool
) -> None:
    """They leave with the bits that they lack; a pass streams these alone."""
    layout = layout_of(dtype)
    cache = split(
        link, dtype, 3, compressed, 2, deferred=3
    )  # the resident layer, and two with codes
    layer = layout.bytes(CAPACITY, 1)
    assert cache.shape.host_bytes == layer + sum(bits_on_host(dtype)) * layer // 16
    with Prefill(cache, 150) as reading:
        before = cache.device_bytes
        for index, qkv in enumerate(text(150, layout)):
            reading.attend(index, *qkv, 0)
        assert [place.is_deferred for place in cache.layers] == [True, False, True, True]
    prefix = layout.bytes(cache.boundary, 1)
    assert cache.traffic.link_out == layout.bytes(150, 1) + sum(bits_on_host(dtype)) * prefix // 16
    cache.onload_deferred()
    assert all(place.is_on_device and not place.is_deferred for place in cache.layers)
    assert cache.device_bytes == before + layer + 2 * layer // 2
    assert cache.traffic.link_in == layout.bytes(150, 1) + 2 * prefix // 2 == came(cache, 150)
    came_before = cache.traffic.link_in
    forward(cache, text(3, layout))
    lacking = 3 * bits_on_host(dtype)[0] * prefix // 16
    assert (
        cache.traffic.link_in - came_before == lacking == cache.shape.streamed_bytes(cache.boundary)
    )


def bits_on_host(dtype: torch.dtype) -> list[int]:
    """Bits of an element that are on the host: of a layer whose codes are early, and two others."""
    return [4, 12, 12] if dtype == torch.bfloat16 else [8, 16, 16]


def came(cache: TieredCache, tokens: int) -> int:
    """What the shape counts, whose resident layers bring recent tokens with them."""
    codes = cache.shape.deferred_bytes(tokens) - cache.layout.bytes(tokens, 1)
    return cache.layout.bytes(tokens, 1) + codes * cache.boundary // tokens


@every_link
@every_dtype
@pytest.mark.parametrize("deferred", [0, 4])
def test_codes_alone_attend_nearly_alike(link: Link, dtype: torch.dtype, deferred: int) -> None:
    layout = layout_of(dtype)
    cache = split(link, dtype, 3, False, 2, deferred if link.copies else 0)
    want = PlainCache(layout, cache.rotary)
    prompt, tokens = text(120, layout), text(5, layout)
    prefill(cache, prompt, chunk=50)
    cache.onload_deferred()
    forward(want, prompt)
    want.advance(120)
    exact = forward(want, tokens)
    before = cache.traffic.link_in
    near = []
    for layer, (q, k, v) in enumerate(tokens):
        place = cache.layers[layer]
        assert place.is_on_device
        rotated = cache.rotary(q, 120, layer)
        place.append(cache.rotary(k, 120, layer), v, 120, cache.boundary)
        near.append(place.attend_on_device(rotated, 125, cache.boundary, ByteCounters()))
    error = (torch.stack(near).float() - exact.float()).abs()
    assert error[0].max() < 0.02  # resident
    assert 1e-3 < error[1:].max() < 0.2
    assert cache.traffic.link_in == before


@every_link
def test_a_cache_comes_back_to_any_place_of_its_text(link: Link) -> None:
    """Elements that were written again meanwhile were the same; so are their outliers."""
    layout = layout_of(torch.bfloat16)
    cache = split(link, torch.bfloat16, 2, True, 2)
    prefill(cache, with_outliers(text(60, layout)), chunk=20)
    early = cache.snapshot()
    parts = [with_outliers(text(20, layout)) for _ in range(6)]
    for part in parts[:5]:
        forward(cache, part)
        cache.advance(20)
    deferred = cache.snapshot()
    found = forward(cache, parts[5])
    cache.restore(early)
    for part in parts[:2]:
        forward(cache, part)
        cache.advance(20)
    cache.restore(deferred)
    assert same(forward(cache, parts[5]), found)


@every_link
def test_only_layers_with_something_of_each_token_are_near(link: Link) -> None:
    cache = split(link, torch.bfloat16, 1, True, 2)
    near = [layer.is_on_device for layer in cache.layers]
    assert near == [kind != "streamed" for kind in cache.shape.placement()]
    assert sum(near) == 2


def test_what_is_not_of_16_bits_is_not_cut() -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        replace(SHAPE, compressed=True)
    with pytest.raises(ValueError, match="but only 3 offloaded ones"):
        replace(SHAPE, layout=layout_of(torch.float16)).with_placement(1, 0, 4)
