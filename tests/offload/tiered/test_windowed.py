"""Layers with a window, beside others: exact outputs from the tokens that they keep."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.cache.static_forward import Place, StaticForward
from offload.cache.streaming import StreamingCache
from offload.cache.streaming_shape import StreamingCacheSpec
from offload.layout import REWIND, HeadShape, KVLayout, Segment, SlidingWindow
from offload.memory.link import Link
from offload.prefill.host_copy import HostCopy
from offload.prefill.layer_major import Prefill, copy_prefix
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.device_view import OnDeviceCache
from offload.tiered.kv_file import KVFile
from offload.tiered.windowed import WindowedLayer
from support.driving import (
    GROUPS,
    LAYOUT,
    QKV,
    ROWS,
    assert_same_forward,
    cache_pair,
    concat,
    first_tokens,
    forward,
    prefill,
    random_qkv,
    speculate,
    tiered_cache,
)
from support.links import CPU, make_test_link, worst_link
from support.reference import PlainCache, random_rotary
from support.slow import slow_except

CAPACITY, WINDOW, STEP = 400, 20, 120
KEPT = WINDOW + REWIND
MIXED = replace(LAYOUT, window=SlidingWindow(WINDOW, frozenset({0, 2}), STEP), groups=GROUPS)
ALL = replace(MIXED, window=SlidingWindow(WINDOW, frozenset(range(4)), STEP))
# heads of layers with a window are fewer and larger
OTHER_HEADS = replace(MIXED, windowed_heads=HeadShape(2, 16, 3))
layouts = pytest.mark.parametrize(
    "layout", [MIXED, ALL, OTHER_HEADS], ids=["mixed", "all", "other heads"]
)


def cache_of(link: Link, layout: KVLayout, resident: int = 0, **options: object) -> TieredCache:
    resident = min(resident, layout.full_layers)
    return tiered_cache(link, resident, layout=layout, capacity=CAPACITY, **options)


def plain(layout: KVLayout, length: int = CAPACITY) -> PlainCache:
    return PlainCache(layout, random_rotary(layout, length))


def append(reference: PlainCache, tokens: list[QKV]) -> Tensor:
    """Return the reference's outputs for more tokens, and advance it by them."""
    out = forward(reference, tokens)
    reference.advance(len(tokens[0][0]))
    return out


@worst_link
@layouts
@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("chunk", slow_except([1, 7, 300], 1))
def test_outputs_equal_plain_arithmetic(
    link: Link, layout: KVLayout, resident: int, chunk: int
) -> None:
    cache, reference = cache_of(link, layout, resident), plain(layout)
    prompt = random_qkv(101, layout)
    torch.testing.assert_close(
        prefill(cache, prompt, chunk), append(reference, prompt), atol=1e-5, rtol=1e-5
    )
    for rows, accepted in [(1, 1), (5, 3), (17, 17), (17, 0), (24, 20)] * 4:
        assert_same_forward(cache, reference, rows, accepted)
    turn = random_qkv(60, layout)
    torch.testing.assert_close(
        prefill(cache, turn, chunk), append(reference, turn), atol=1e-5, rtol=1e-5
    )


@worst_link
@layouts
def test_rotary_tables_of_their_own(link: Link, layout: KVLayout) -> None:
    cache, reference = cache_of(link, layout), plain(layout)
    window = layout.window
    assert window is not None
    for each in (cache, reference):
        each.rotary.rotate_windowed(torch.tensor([1.0, 0.3, 0.2, 0.1]), 1.5, window.layers)
    prompt = random_qkv(50, layout)
    torch.testing.assert_close(
        prefill(cache, prompt, 9), append(reference, prompt), atol=1e-5, rtol=1e-5
    )
    assert_same_forward(cache, reference, 4, 4)


@worst_link
def test_batch_invariant_outputs_do_not_depend_on_the_forwards(link: Link) -> None:
    prompt, more = random_qkv(77, MIXED), random_qkv(60, MIXED)
    outputs = []
    for sizes in ([1] * 60, [60], [7, 20, 33]):
        cache = cache_of(link, MIXED, 1, rows=60, batch_invariant=True)
        prefill(cache, prompt, 77)
        parts, start = [], 0
        for size in sizes:
            part = [tuple(x[start : start + size] for x in qkv) for qkv in more]
            parts.append(forward(cache, part))
            cache.advance(size)
            start += size
        outputs.append(torch.cat(parts, dim=1))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    reference = plain(MIXED)
    append(reference, prompt)
    torch.testing.assert_close(outputs[0], append(reference, more), atol=1e-5, rtol=1e-5)


@worst_link
@layouts
@pytest.mark.parametrize("chunk", slow_except([7, 64, 300], 0))
def test_a_sequence_can_be_shortened_to_where_its_windows_are_kept(
    link: Link, layout: KVLayout, chunk: int
) -> None:
    """At the end, and at multiples of the step, whether prefill or decoding went past these."""
    cache, tokens = cache_of(link, layout, recent=0), random_qkv(230, layout)
    prefill(cache, tokens, chunk)
    for _ in range(5):
        more = random_qkv(20, layout)
        forward(cache, more)
        cache.advance(20)
        tokens = concat(tokens, more)
    back = cache.boundary - REWIND
    expected = {330: 330, back: back, 235: 235, 176: 176, 175: 120, 120: 120, 56: 56}
    assert {length: cache.resumable(length) for length in expected} == expected
    assert cache.resumable(55) == 0
    with pytest.raises(ValueError, match="cannot shorten to 55 tokens: layers have dropped"):
        cache.truncate(55)
    assert back == 236
    with pytest.raises(ValueError, match="cannot shorten to 235 tokens: layers have dropped"):
        cache.crop(235)  # the device does not have the window
    for length in (310, 240, 177, 120, 60, 0):
        cache.truncate(length)
        reference = plain(layout)
        kept = first_tokens(tokens, length)
        if length:
            append(reference, kept)
        more = random_qkv(17, layout)
        torch.testing.assert_close(
            prefill(cache, more, chunk), append(reference, more), atol=1e-5, rtol=1e-5
        )
        tokens = concat(kept, more)
        if cache.is_block_aligned:
            assert_same_forward(cache, reference, 5, 0)


@worst_link
@layouts
@pytest.mark.parametrize("through", ["cache", "copy"])
def test_a_prefix_is_copied_where_its_window_is_held(
    link: Link, layout: KVLayout, through: str
) -> None:
    tokens = random_qkv(270, layout)
    source = cache_of(link, layout, 1)
    prefill(source, tokens, 64)
    held: TieredCache | HostCopy = source
    if through == "copy":
        held = HostCopy(layout, 270)
        list(held.fill(source))
        everything = layout.bytes(270, layout.full_layers)
        everything += layout.windowed.bytes(270, layout.layers - layout.full_layers)
        assert held.nbytes < everything
    for shared in (265, 240, 130, 110):
        assert held.copyable(shared) == (120 if shared == 130 else shared)
        shared = held.copyable(shared)
        cache, reference = cache_of(link, layout), plain(layout)
        steps = copy_prefix(held, cache, shared)
        if shared == 265:
            forward(source, random_qkv(24, layout))  # goes on, and may drop tokens
            source.advance(24)
            forward(source, random_qkv(24, layout))
        assert list(steps) == list(range(layout.layers))
        append(reference, first_tokens(tokens, shared))
        rest = random_qkv(40, layout)
        torch.testing.assert_close(
            prefill(cache, rest, 64), append(reference, rest), atol=1e-5, rtol=1e-5
        )
        assert cache.resumable(120) == 120  # it can be copied on
    assert held.copyable(40) == 0


@worst_link
def test_files_hold_the_last_tokens(link: Link, tmp_path: Path) -> None:
    tokens = random_qkv(200, MIXED)
    cache, loaded, reference = cache_of(link, MIXED), cache_of(link, MIXED, 1), plain(MIXED)
    prefill(cache, tokens, 64)
    window = MIXED.window
    assert window is not None
    with Prefill(loaded, 200) as context:
        for layer, reader in enumerate(cache.host_readers()):
            start = 200 - window.kept if layer in window.layers else 0
            file = KVFile(tmp_path / f"{layer}", MIXED, 200, first=start)
            checksums = file.write(reader)
            assert file.path.stat().st_size == file.nbytes == MIXED.bytes(200 - start, 1)
            blocks = (read() for read in file.readers(200, checksums))
            context.load_blocks(layer, blocks, Segment(start, 200))
    append(reference, tokens)
    assert_same_forward(loaded, reference, 5, 5)


def spec_of(quantised: bool, budget: int = 64) -> RetrievalCacheSpec:
    shape = RetrievalCacheSpec.of(budget, 4, CAPACITY, ROWS, 100)
    return replace(shape, quantised=quantised)


@worst_link
@layouts
@pytest.mark.parametrize("quantised", slow_except([False, True], 1))
def test_windows_of_a_retrieval_cache_are_exact(
    link: Link, layout: KVLayout, quantised: bool
) -> None:
    """Whatever the budget: nothing is selected in them, eagerly or in static shapes."""
    target, middle = cache_pair(
        link, 1 if layout is MIXED else 0, spec_of(quantised), layout=layout
    )
    window = layout.window
    assert window is not None
    windowed = sorted(window.layers)
    sequence = random_qkv(150, layout)
    prefill(target, sequence, 64)
    static, rng = StaticForward([middle], 4), random.Random(0)

    def check(known: list[QKV], out: Tensor) -> None:
        reference, rows = plain(layout), out.shape[1]
        expected = append(reference, known)[windowed, -rows:]
        torch.testing.assert_close(out[windowed], expected, atol=1e-5, rtol=1e-5)
        last = [tuple(x[-rows:] for x in qkv) for qkv in known]
        static.place(0, Place.after(middle, rows))
        static.begin_forward(rows)
        for layer, (q, k, v) in enumerate(last):
            padded = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 4 - rows)) for x in (q, k, v))
            again = static.attend(layer, *padded, 0)[0][:rows]
            own = out[layer][..., : again.shape[-1]]
            torch.testing.assert_close(again, own, atol=1e-5, rtol=1e-5)

    for _ in range(12):
        sequence, _ = speculate(target, middle, sequence, 6, rng, check)
    assert middle.device_bytes == spec_of(quantised).device_bytes(layout)


@worst_link
@layouts
def test_the_device_view_attends_to_the_targets_windows(link: Link, layout: KVLayout) -> None:
    target = cache_of(link, layout, layout.full_layers, rows=2 * ROWS)
    view = OnDeviceCache(target, None)
    tokens, reference = random_qkv(150, layout), plain(layout)
    prefill(target, tokens, 64)
    append(reference, tokens)
    for _ in range(5):
        draft = random_qkv(4, layout)
        out = forward(view, draft)
        torch.testing.assert_close(out, forward(reference, draft), atol=1e-5, rtol=1e-5)
        assert_same_forward(target, reference, 20, 11)


@layouts
@pytest.mark.parametrize("slack", [8, 60])
def test_a_draft_sees_no_more_than_its_windows(slack: int, layout: KVLayout) -> None:
    """Slots of a draft's cache are its positions: sinks are as far away as their slots are."""
    spec = StreamingCacheSpec(3, 30, slack)
    cache = StreamingCache(layout, spec, random_rotary(layout, spec.slots), CPU)
    assert cache.device_bytes == spec.device_bytes(layout)
    static, rng = StaticForward([cache], 4), random.Random(1)
    kept: list[QKV] = []
    for _ in range(60):
        rows = rng.randint(1, 4)
        tokens = random_qkv(rows, layout)
        out = forward(cache, tokens)
        slot, _ = cache.slot_and_position(cache.length)
        if kept and slot < len(kept[0][0]):  # it has slid
            kept = [tuple(torch.cat((x[:3], x[-30:])) for x in qkv) for qkv in kept]
        kept = concat(kept, tokens) if kept else tokens
        expected = append(plain(layout, spec.slots), kept)[:, -rows:]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        static.place(0, Place.after(cache, rows))
        static.begin_forward(rows)
        for layer, qkv in enumerate(tokens):
            padded = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 4 - rows)) for x in qkv)
            again = static.attend(layer, *padded, 0)[0][:rows]
            own = out[layer][..., : again.shape[-1]]
            torch.testing.assert_close(again, own, atol=1e-5, rtol=1e-5)
        cache.advance(rows)


@worst_link
@layouts
@pytest.mark.parametrize("resident", [0, 1])
def test_planned_bytes_are_allocated(link: Link, layout: KVLayout, resident: int) -> None:
    cache = cache_of(link, layout, resident)
    tiers = cache.shape.device_breakdown(prefill=False)
    assert cache.device_bytes == sum(tiers.values())
    windows = [each for each in cache.layers if isinstance(each, WindowedLayer)]
    assert tiers["layers with a window"] == sum(each.device_bytes for each in windows)
    offloaded = layout.full_layers - min(resident, layout.full_layers)
    checkpoints = layout.windowed.bytes((CAPACITY // STEP + 1) * KEPT, len(windows))
    assert cache.shape.host_bytes == layout.bytes(offloaded * CAPACITY, 1) + checkpoints


@worst_link
def test_windows_never_cross_the_link(link: Link) -> None:
    if not link.copies:
        pytest.skip("nothing is copied")
    cache = cache_of(link, MIXED)
    prefill(cache, random_qkv(200, MIXED), 64)
    before = cache.traffic.link_in
    forward(cache, random_qkv(3, MIXED))
    full = MIXED.bytes(cache.boundary, MIXED.full_layers)
    assert cache.traffic.link_in - before == full == cache.shape.streamed_bytes(cache.boundary)


@worst_link
@layouts
def test_a_snapshot_has_the_windows(link: Link, layout: KVLayout) -> None:
    cache, tokens = cache_of(link, layout), random_qkv(130, layout)
    prefill(cache, tokens, 64)
    saved = cache.snapshot()
    for _ in range(10):
        forward(cache, random_qkv(20, layout))
        cache.advance(20)
    cache.restore(saved)
    reference = plain(layout)
    append(reference, tokens)
    assert_same_forward(cache, reference, 20, 20)
    assert cache.resumable(240) == 150


@worst_link
def test_a_shortened_sequence_has_no_windows_of_what_was_dropped(link: Link) -> None:
    cache, tokens = cache_of(link, MIXED, recent=0), random_qkv(121, MIXED)
    prefill(cache, tokens, 64)
    cache.crop(118)
    more = random_qkv(24, MIXED)
    for start in range(0, 24, 12):
        forward(cache, [tuple(x[start : start + 12] for x in qkv) for qkv in more])
        cache.advance(12)
    known = concat(first_tokens(tokens, 118), more)
    length = cache.resumable(120)
    cache.truncate(length)
    reference, rest = plain(MIXED), random_qkv(30, MIXED)
    append(reference, first_tokens(known, length))
    torch.testing.assert_close(
        prefill(cache, rest, 64), append(reference, rest), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("window", [1, 150, 1000])
@pytest.mark.parametrize("tokens", [119, 120, 121, 200, 240])
def test_windows_longer_than_the_step_are_copied(window: int, tokens: int) -> None:
    link = make_test_link("emulated")
    layout = replace(MIXED, window=SlidingWindow(window, frozenset({0, 2}), STEP))
    source, cache, reference = cache_of(link, layout), cache_of(link, layout), plain(layout)
    sequence = random_qkv(tokens + 40, layout)
    prefill(source, sequence, 64)
    list(copy_prefix(source, cache, tokens))
    append(reference, first_tokens(sequence, tokens))
    rest = random_qkv(40, layout)
    torch.testing.assert_close(
        prefill(cache, rest, 64), append(reference, rest), atol=1e-5, rtol=1e-5
    )
