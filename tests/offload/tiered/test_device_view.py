"""Drafting from the target's on-device KV leaves the target unchanged."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.layout import KVLayout
from offload.memory.link import Link
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec, SplitSelectionSpec
from offload.retrieval.split_selection import SplitSelection
from offload.tiered.cache import TieredCache
from offload.tiered.device_view import OnDeviceCache
from offload.tiered.kv_file import HostReader
from offload.tiered.split import SplitLayer
from support.driving import LAYOUT, QKV, forward, prefill, random_qkv, tiered_cache
from support.links import every_link, make_test_link, worst_link
from support.slow import slow_except

LAYOUT_16 = replace(LAYOUT, dtype=torch.bfloat16)
SHAPE = RetrievalCacheSpec(
    budget=40, chunk=4, window=8, block=12, context=400, rows=12, append_room=200
)


def make_target(link: Link, split: int, layout: KVLayout = LAYOUT_16) -> TieredCache:
    """Return a cache with one resident layer and three offloaded ones, some of them split."""
    return tiered_cache(
        link,
        resident=1,
        split=split,
        compressed=layout is LAYOUT_16,
        layout=layout,
        capacity=SHAPE.context,
        recent=SHAPE.window,
        block=SHAPE.block,
        rows=2 * SHAPE.rows,
    )


def make_device_view(
    target: TieredCache, quantised: bool = False, selects: bool = False
) -> OnDeviceCache:
    """Return the device view of a target, with a retrieval cache for layers that are not on it.

    With `selects`, some keys of split layers are exact.
    """
    layers = [index for index, layer in enumerate(target.layers) if not layer.is_on_device]
    retrieval = None
    if layers:
        policy, device = POLICIES["attention"](), target.link.device
        rotary = target.rotary
        shape = replace(SHAPE, quantised=quantised)
        retrieval = RetrievalCache(LAYOUT_16, shape, policy, rotary, device, 1, layers)
        target.observers.append(retrieval)
    return OnDeviceCache(target, retrieval, split_selection(target) if selects else None)


def split_selection(target: TieredCache, chunk: int = 4) -> SplitSelection:
    """Return an observer of the split layers of a target, with 40 keys of each head."""
    layers = [
        index
        for index, layer in enumerate(target.layers)
        if isinstance(layer, SplitLayer) and layer.is_on_device
    ]
    spec = SplitSelectionSpec(40, chunk, SHAPE.context)
    policy, device = POLICIES["attention"](), target.link.device
    selection = SplitSelection(target.layout, spec, policy, layers, device)
    target.observers.append(selection)
    return selection


@worst_link
@pytest.mark.parametrize("quantised", slow_except([False, True], 1))
@pytest.mark.parametrize("split", [3, 1, 0])
@pytest.mark.parametrize("selects", [False, True])
def test_drafting_does_not_change_the_target(
    link: Link, split: int, quantised: bool, selects: bool
) -> None:
    rng = random.Random(split)
    target, reference = make_target(link, split), make_target(link, split)
    reference.rotary = target.rotary
    device_view = make_device_view(target, quantised, selects)
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


def read_kv(reader: HostReader, tokens: int) -> Tensor:
    """Return a layer's KV (2, Hkv, N, D)."""
    return torch.stack([reader(head, 0, tokens) for head in range(LAYOUT.heads)], dim=1)


def expected_attention(view: OnDeviceCache, layer: int, tokens: list[QKV], exact: Tensor) -> Tensor:
    """Return a split layer's attention by plain operations; exact (2, Hkv, N, D) is its KV."""
    target, split_layer = view.target, view.target.layers[layer]
    assert isinstance(split_layer, SplitLayer)
    assert view.selection is not None
    selected = view.selection.selected_keys(layer)
    assert selected is not None
    seen = exact.clone()
    split_layer._split_kv.decode_high(0, seen[:, :, : target.boundary])
    for head, chunks in enumerate(selected.chunks):
        rows = (chunks[:, None] * selected.chunk + torch.arange(selected.chunk)).flatten()
        assert rows.unique().shape == (40,)
        seen[0, head, rows] = exact[0, head, rows]
        places = selected.places[head]
        assert places[chunks].tolist() == list(range(len(chunks)))
        assert (places >= 0).sum() == len(chunks)
    q, k, v = tokens[layer]
    q = target.rotary.queries(q, target.length, layer)
    k = target.rotary.keys(k, target.length, layer)
    keys, values = torch.cat((seen, torch.stack((k, v)).transpose(1, 2)), dim=2).transpose(1, 2)
    return partial_attention(q, keys, values, causal=True)[0]


@worst_link
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_selected_keys_are_exact(link: Link, dtype: torch.dtype) -> None:
    """In every split layer, after a prompt and after verifications that move the boundary."""
    layout = replace(LAYOUT, dtype=dtype)
    target = make_target(link, 3, layout)
    view = OnDeviceCache(target, None, split_selection(target))
    prefill(target, random_qkv(150, layout), 32)
    boundaries = set()
    for _ in range(6):
        exact = [read_kv(reader, target.length) for reader in target.host_readers()]
        tokens = random_qkv(5, layout)
        outs = forward(view, tokens)
        for layer in (1, 2, 3):
            expected = expected_attention(view, layer, tokens, exact[layer])
            torch.testing.assert_close(outs[layer], expected, atol=1e-2, rtol=1e-2)
        boundaries.add(target.boundary)
        forward(target, tokens)
        target.advance(5)
    assert len(boundaries) > 1


def test_a_selection_is_restored_and_ends_with_its_sequence() -> None:
    target = make_target(make_test_link("view"), 3)
    view = OnDeviceCache(target, None, selection := split_selection(target, chunk=2))
    prefill(target, random_qkv(150, LAYOUT_16), 32)
    states, tokens = (view.snapshot(), target.snapshot()), random_qkv(5, LAYOUT_16)
    first = forward(view, tokens)
    before = selection.tensors[1].clone()
    forward(target, random_qkv(5, LAYOUT_16))
    target.advance(5)
    assert not torch.equal(selection.tensors[1], before)
    view.restore(states[0])
    target.restore(states[1])
    assert torch.equal(forward(view, tokens), first)
    target.truncate(70)
    assert selection.selected_keys(1) is None
    prefill(target, random_qkv(50, LAYOUT_16), 32)
    selected = selection.selected_keys(1)
    assert selected is not None
    assert selected.chunks.max() < target.boundary / 2


def test_prefix_tokens_cannot_be_cropped() -> None:
    target = make_target(make_test_link("view"), 3)
    device_view = make_device_view(target)
    prefill(target, random_qkv(90, LAYOUT_16), 32)
    with pytest.raises(ValueError, match="the first 72 are before the offload boundary"):
        device_view.crop(71)
