"""A split layer attends to exactly the original elements, for the fewest bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.memory.link import Link
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from offload.traffic import ByteCounters
from support.driving import CAPACITY, LAYOUT, QKV, SHAPE, forward, prefill, random_qkv, tiered_cache
from support.links import every_link
from support.reference import PlainCache
from support.slow import slow_except

every_dtype = pytest.mark.parametrize(
    "dtype", slow_except([torch.bfloat16, torch.float16]), ids=str
)
copying_links = pytest.mark.parametrize("link", ["emulated", "delaying"], indirect=True)
# split layers of the three offloaded ones, whether the others are compressed, heads per chunk
PLACEMENTS = [(0, True, 1), (1, False, 2), (2, True, 3), (3, False, 1), (3, False, 2)]
# query tokens of a forward, how many are accepted, and the length to crop to afterwards
FORWARDS = [(1, 1, None), (17, 12, None), (5, 0, None), (24, 24, None), (2, 2, 33), (9, 9, None)]


def layout_of(dtype: torch.dtype) -> KVLayout:
    return replace(LAYOUT, dtype=dtype)


def split_cache(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, heads: int, deferred: int = 0
) -> TieredCache:
    """Return a cache with one resident layer and three offloaded ones, some of them split."""
    return tiered_cache(
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


def bits_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@every_link
@every_dtype
@pytest.mark.parametrize(("layers", "compressed", "heads"), PLACEMENTS)
def test_outputs_are_bit_identical_to_those_without_splitting(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, heads: int
) -> None:
    check_outputs(link, split_cache(link, dtype, layers, compressed, heads), heads)


@copying_links
@every_dtype
@pytest.mark.parametrize(
    ("layers", "compressed", "deferred"), [(1, False, 2), (3, False, 3), (2, True, 2)]
)
def test_outputs_are_bit_identical_with_deferred_layers(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, deferred: int
) -> None:
    """The resident layer is deferred, too."""
    check_outputs(link, split_cache(link, dtype, layers, compressed, 2, deferred), 2)


def check_outputs(link: Link, cache: TieredCache, heads: int) -> None:
    dtype = cache.layout.dtype
    reference = split_cache(link, dtype, 0, False, heads)
    reference.rotary = cache.rotary
    prompt = with_outliers(random_qkv(70, layout_of(dtype)))
    assert bits_equal(prefill(cache, prompt, chunk=16), prefill(reference, prompt, chunk=16))
    for rows, accepted, crop in FORWARDS * 2:
        tokens = with_outliers(random_qkv(rows, layout_of(dtype)))
        assert bits_equal(forward(cache, tokens), forward(reference, tokens))
        for kv_cache in (cache, reference):
            kv_cache.advance(accepted)
            if crop is not None:
                kv_cache.crop(crop)


@every_link
@every_dtype
def test_a_whole_sequence_is_reconstructed_exactly(link: Link, dtype: torch.dtype) -> None:
    """Observers of a forward are notified of the exact elements."""
    cache = split_cache(link, dtype, 3, False, 2)
    tokens = with_outliers(random_qkv(CAPACITY - 1, layout_of(dtype)))
    prefill(cache, tokens, chunk=50)
    link.drain()
    cache.begin_forward(1)
    prefixes: list[Tensor] = []

    class Observer:
        def on_forward(self, boundary: int, length: int, end: int) -> None: ...

        def on_attention(
            self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
        ) -> None:
            if layer:
                prefixes.append(prefix.clone())

        def on_advance(self, length: int) -> None: ...

    cache.observers.append(Observer())
    forward(cache, random_qkv(1, layout_of(dtype)))
    actual = torch.cat([torch.cat(prefixes[at : at + 2], dim=1) for at in range(0, 6, 2)])
    for layer, (_, k, v) in enumerate(tokens[1:], 1):
        keys = cache.rotary.keys(k, 0, layer)[: cache.boundary].transpose(0, 1)
        assert bits_equal(actual[2 * layer - 2], keys)
        assert bits_equal(actual[2 * layer - 1], v[: cache.boundary].transpose(0, 1))


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
def test_a_forward_streams_only_the_low_bits(
    link: Link, dtype: torch.dtype, layers: int, compressed: bool, share: float
) -> None:
    cache = split_cache(link, dtype, layers, compressed, 2)
    layout = layout_of(dtype)
    prefill(cache, random_qkv(150, layout), chunk=64)
    whole = layout.bytes(cache.boundary, 3)
    assert cache.traffic.link_out == share * whole
    forward(cache, random_qkv(3, layout))
    assert cache.traffic.link_in == share * whole
    assert cache.shape.host_bytes == share * layout.bytes(CAPACITY, 3)


@copying_links
@every_dtype
@pytest.mark.parametrize("compressed", [False, True])
def test_deferred_high_bytes_cross_the_link_once(
    link: Link, dtype: torch.dtype, compressed: bool
) -> None:
    """They leave with their low bits; a forward streams only these."""
    layout = layout_of(dtype)
    cache = split_cache(
        link, dtype, 3, compressed, 2, deferred=3
    )  # the resident layer, and two split ones
    layer = layout.bytes(CAPACITY, 1)
    assert cache.shape.host_bytes == layer + sum(bits_on_host(dtype)) * layer // 16
    with Prefill(cache, 150) as context:
        before = cache.device_bytes
        for index, qkv in enumerate(random_qkv(150, layout)):
            context.attend(index, *qkv, 0)
        assert [layer_kv.is_deferred for layer_kv in cache.layers] == [True, False, True, True]
    prefix = layout.bytes(cache.boundary, 1)
    assert cache.traffic.link_out == layout.bytes(150, 1) + sum(bits_on_host(dtype)) * prefix // 16
    cache.onload_deferred()
    assert all(layer_kv.is_on_device and not layer_kv.is_deferred for layer_kv in cache.layers)
    assert cache.device_bytes == before + layer + 2 * layer // 2
    assert (
        cache.traffic.link_in
        == layout.bytes(150, 1) + 2 * prefix // 2
        == deferred_bytes(cache, 150)
    )
    link_in = cache.traffic.link_in
    forward(cache, random_qkv(3, layout))
    low_bytes = 3 * bits_on_host(dtype)[0] * prefix // 16
    assert (
        cache.traffic.link_in - link_in == low_bytes == cache.shape.streamed_bytes(cache.boundary)
    )


def bits_on_host(dtype: torch.dtype) -> list[int]:
    """Return each layer's bits per element on the host; only the first is not deferred."""
    return [4, 12, 12] if dtype == torch.bfloat16 else [8, 16, 16]


def deferred_bytes(cache: TieredCache, tokens: int) -> int:
    """Return what the spec counts, with the tail of resident layers included."""
    codes = cache.shape.deferred_bytes(tokens) - cache.layout.bytes(tokens, 1)
    return cache.layout.bytes(tokens, 1) + codes * cache.boundary // tokens


@every_link
@every_dtype
@pytest.mark.parametrize("deferred", [0, 4])
def test_attention_to_high_bytes_is_approximate(
    link: Link, dtype: torch.dtype, deferred: int
) -> None:
    layout = layout_of(dtype)
    cache = split_cache(link, dtype, 3, False, 2, deferred if link.copies else 0)
    reference = PlainCache(layout, cache.rotary)
    prompt, tokens = random_qkv(120, layout), random_qkv(5, layout)
    prefill(cache, prompt, chunk=50)
    cache.onload_deferred()
    forward(reference, prompt)
    reference.advance(120)
    exact = forward(reference, tokens)
    before = cache.traffic.link_in
    outs = []
    for layer, (q, k, v) in enumerate(tokens):
        layer_kv = cache.layers[layer]
        assert layer_kv.is_on_device
        rotated = cache.rotary.queries(q, 120, layer)
        layer_kv.append(cache.rotary.keys(k, 120, layer), v, 120, cache.boundary)
        outs.append(layer_kv.attend_on_device(rotated, 125, cache.boundary, ByteCounters())[0])
    error = (torch.stack(outs).float() - exact.float()).abs()
    assert error[0].max() < 0.02  # resident
    assert 1e-3 < error[1:].max() < 0.2
    assert cache.traffic.link_in == before


@every_link
def test_a_cache_can_be_restored_to_any_length(link: Link) -> None:
    """Elements rewritten in between are the same, and so are their outliers."""
    layout = layout_of(torch.bfloat16)
    cache = split_cache(link, torch.bfloat16, 2, True, 2)
    prefill(cache, with_outliers(random_qkv(60, layout)), chunk=20)
    earlier = cache.snapshot()
    parts = [with_outliers(random_qkv(20, layout)) for _ in range(6)]
    for part in parts[:5]:
        forward(cache, part)
        cache.advance(20)
    later = cache.snapshot()
    actual = forward(cache, parts[5])
    cache.restore(earlier)
    for part in parts[:2]:
        forward(cache, part)
        cache.advance(20)
    cache.restore(later)
    assert bits_equal(forward(cache, parts[5]), actual)


@every_link
def test_resident_and_split_layers_are_on_device(link: Link) -> None:
    cache = split_cache(link, torch.bfloat16, 1, True, 2)
    on_device = [layer.is_on_device for layer in cache.layers]
    assert on_device == [layer.kind != "streamed" for layer in cache.shape.layers()]
    assert sum(on_device) == 2


def test_only_16_bit_elements_can_be_split() -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        replace(SHAPE, compressed=True)
    with pytest.raises(ValueError, match="but only 3 offloaded ones"):
        replace(SHAPE, layout=layout_of(torch.float16)).with_placement(1, 0, 4)
