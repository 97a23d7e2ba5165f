"""The placement of KV never changes attention outputs, and every byte over the link is counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.memory.host_arena import HostArena
from offload.memory.link import Copy, Link
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from offload.tiered.offloaded import OffloadedLayer
from offload.tiered.shape import TieredCacheSpec
from support.driving import (
    BLOCK,
    CAPACITY,
    LAYOUT,
    RECENT,
    SHAPE,
    TAIL,
    assert_same_forward,
    forward,
    plain_cache,
    prefill,
    random_qkv,
    tiered_cache,
)
from support.links import CPU, CountingLink, DelayingLink, every_link, make_test_link
from support.slow import slow_except

LAYERS = LAYOUT.layers
every_split = pytest.mark.parametrize("resident", range(LAYERS + 1))
# query tokens of a forward, how many are accepted, and the length to crop to afterwards (or None);
# the boundary moves by 12 tokens
FORWARDS = [
    (1, 1, None),
    (5, 3, None),
    (17, 17, None),
    (17, 0, None),
    (2, 2, None),
    (1, 1, 60),
    (24, 20, None),
    (1, 1, 33),
    (9, 9, 5),
]


def boundary_at(length: int) -> int:
    """Return the boundary: whole blocks, with at least RECENT tokens after them."""
    return max(0, length - RECENT) // BLOCK * BLOCK


def host_kv(cache: TieredCache) -> Tensor:
    """Return the host's part of offloaded layers, (L, 2, Hkv, capacity, D)."""
    layers = [layer for layer in cache.layers if isinstance(layer, OffloadedLayer)]
    return torch.stack([layer._host.kv for layer in layers])


@every_link
@every_split
@pytest.mark.parametrize("slot_heads", slow_except([1, 2, 3], 1))
def test_outputs_do_not_depend_on_the_tiers(link: Link, resident: int, slot_heads: int) -> None:
    cache, reference = tiered_cache(link, resident, slot_heads=slot_heads), plain_cache()
    prompt = random_qkv(50)
    torch.testing.assert_close(
        prefill(cache, prompt, chunk=16), forward(reference, prompt), atol=1e-5, rtol=1e-5
    )
    reference.advance(50)
    for rows, accepted, crop in FORWARDS * 2:
        assert_same_forward(cache, reference, rows, accepted, crop)
        assert cache.length == reference.length


@every_link
def test_a_cache_needs_no_prefill(link: Link) -> None:
    cache, reference = tiered_cache(link, resident=1), plain_cache()
    for rows in [24, 1, 20, 3, 17, 1]:
        assert_same_forward(cache, reference, rows, rows)


@every_link
def test_a_forward_that_was_not_advanced_can_be_repeated(link: Link) -> None:
    cache = tiered_cache(link, resident=1)
    prefill(cache, random_qkv(40), chunk=40)
    tokens, longer = random_qkv(3), random_qkv(9)
    before = forward(cache, tokens)
    forward(cache, longer)  # never advanced
    assert torch.equal(forward(cache, tokens), before)


@every_link
def test_an_aborted_forward_has_no_effect(link: Link) -> None:
    cache, reference = tiered_cache(link, resident=1), plain_cache()
    prompt = random_qkv(50)
    prefill(cache, prompt, chunk=13)
    forward(reference, prompt)
    reference.advance(50)
    for layers, rows in product([1, 2, 3], [1, 4]):
        cache.begin_forward(rows)
        for layer, qkv in enumerate(random_qkv(rows)[:layers]):
            cache.attend(layer, *qkv, cache.length)
        tokens = random_qkv(7)
        torch.testing.assert_close(
            forward(cache, tokens), forward(reference, tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(7)
        reference.advance(7)


@every_link
def test_a_cache_can_be_reused(link: Link) -> None:
    cache = tiered_cache(link, resident=1)
    for length in (70, 30, 90):
        reference, prompt, tokens = plain_cache(), random_qkv(length), random_qkv(5)
        torch.testing.assert_close(
            prefill(cache, prompt, chunk=16), forward(reference, prompt), atol=1e-5, rtol=1e-5
        )
        reference.advance(length)
        torch.testing.assert_close(
            forward(cache, tokens), forward(reference, tokens), atol=1e-5, rtol=1e-5
        )
        # copies are in flight into the slots that prefill is about to use
        cache.begin_forward(1)
        cache.crop(0)


@every_link
def test_short_forwards_after_a_crop_to_nothing_do_not_see_what_was_there(link: Link) -> None:
    """Copies ahead of the next forward hold the prefix of the old sequence."""
    cache, reference = tiered_cache(link, resident=1), plain_cache()
    prefill(cache, random_qkv(60), chunk=16)
    forward(cache, random_qkv(5))
    cache.crop(0)
    for rows in [10, 9, 8, 7, 9, 10]:
        assert_same_forward(cache, reference, rows, rows)


def test_a_forward_begins_with_what_its_predecessor_copied_ahead() -> None:
    """Of as many chunks as there are slots, only tokens that the boundary has passed are copied."""
    link = CountingLink(CPU, rate=1e12)
    layers, slots = LAYOUT.layers, SHAPE.slots
    cache = tiered_cache(link, resident=0, slot_heads=LAYOUT.heads)
    prefill(cache, random_qkv(60), chunk=16)
    token_bytes = LAYOUT.bytes(1, 1)
    copied = []
    for index in range(20):
        before, boundary = link.copied_bytes, cache.boundary
        cache.begin_forward(3)
        moved = cache.boundary - boundary
        written = layers * moved  # to the host
        ahead = 0 if index == 0 else slots
        expected = (slots - ahead) * cache.boundary + ahead * moved + written
        assert link.copied_bytes - before == token_bytes * expected
        copied.append(moved)
        for layer, qkv in enumerate(random_qkv(3)):
            cache.attend(layer, *qkv, cache.length)
        # a chunk per layer: the other layers', and the next forward's first ones
        expected += layers * cache.boundary
        assert link.copied_bytes - before == token_bytes * expected
        cache.advance(3)
    assert 0 in copied
    assert max(copied) > 0
    link.close()


class RecordingLink(DelayingLink):
    """Keeps the ticket of every copy."""

    def copy(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._record(super().copy(pairs))

    def copy_out(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._record(super().copy_out(pairs))

    def _record(self, ticket: threading.Event) -> threading.Event:
        self.tickets = [*getattr(self, "tickets", []), ticket]
        return self.tickets[-1]


def test_copies_finish_before_their_memory_is_reused() -> None:
    link = RecordingLink(delay=1e-2)
    arena = HostArena(link, LAYOUT.dtype)
    cache = TieredCache(TieredCacheSpec(LAYOUT, 90, 1, block=16), link, plain_cache().rotary, arena)
    prefill(cache, random_qkv(80), chunk=16)
    assert all(ticket.is_set() for ticket in link.tickets)
    cache.begin_forward(1)
    cache.crop(0)
    with Prefill(cache, 80):  # layers are built in the memory of the slots
        assert all(ticket.is_set() for ticket in link.tickets)
    cache.begin_forward(1)
    arena.allocate((5,))
    assert all(ticket.is_set() for ticket in link.tickets)
    link.close()


@every_link
def test_sequences_share_an_arena(link: Link) -> None:
    arena = HostArena(link, LAYOUT.dtype)
    for capacity in (90, 40, 120):
        reference = plain_cache()
        shape = TieredCacheSpec(LAYOUT, capacity, 1, recent=3, block=8, rows=5, copies=link.copies)
        cache = TieredCache(shape, link, reference.rotary, arena)
        prompt, tokens = random_qkv(capacity - 10), random_qkv(5)
        prefill(cache, prompt, chunk=16)
        forward(reference, prompt)
        reference.advance(capacity - 10)
        torch.testing.assert_close(
            forward(cache, tokens), forward(reference, tokens), atol=1e-5, rtol=1e-5
        )
        cache.begin_forward(1)  # its copies are in flight when the next sequence begins
    assert arena.nbytes == LAYOUT.bytes(120, LAYERS - 1)


@every_link
@pytest.mark.parametrize("prompt", [3, 17, 50, 53, 65])
def test_after_prefill_the_host_has_the_prefix_and_the_tail_the_rest(
    link: Link, prompt: int
) -> None:
    cache, reference = tiered_cache(link, resident=1), plain_cache()
    boundary = boundary_at(prompt)
    tokens = random_qkv(prompt)
    prefill(cache, tokens, chunk=16)
    # (L - 1, 2, Hkv, T, D), without waiting: no copy may be in flight any more
    stored = host_kv(cache)[:, :, :, :boundary].clone()
    tail = cache.buffers.tails[:, :, :, : prompt - boundary]
    forward(reference, tokens)
    reference.advance(prompt)
    assert cache.boundary == boundary
    torch.testing.assert_close(
        torch.cat((stored, tail), dim=3).transpose(2, 3), reference.kv[1:], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("layers", [1, 2, 6, 32, 40])
def test_resident_layers_are_spread_evenly_and_the_first_is_one(layers: int) -> None:
    for resident in range(layers + 1):
        shape = TieredCacheSpec(replace(LAYOUT, layers=layers), CAPACITY, resident)
        resident_indices = [
            index for index, layer in enumerate(shape.layers()) if layer.kind == "resident"
        ]
        assert len(resident_indices) == resident
        assert not resident or resident_indices[0] == 0
        gaps = [after - before for before, after in pairwise([*resident_indices, layers])]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1


@every_link
@pytest.mark.parametrize(("recent", "block"), [(0, 1), (0, 12), (7, 1), (5, 12), (30, 4)])
def test_a_forward_first_moves_the_boundary_to_its_maximum(
    link: Link, recent: int, block: int
) -> None:
    cache, reference = tiered_cache(link, 2, recent=recent, block=block), plain_cache()
    for rows, accepted in [
        (7, 7),
        (1, 1),
        (24, 24),
        (24, 2),
        (5, 0),
        (3, 3),
        (24, 24),
        (24, 24),
        (1, 1),
        (9, 9),
    ]:
        tokens = random_qkv(rows)
        before = cache.boundary
        out = forward(cache, tokens)
        assert cache.boundary == max(0, (cache.length - recent) // block * block) >= before
        torch.testing.assert_close(out, forward(reference, tokens), atol=1e-5, rtol=1e-5)
        for kv_cache in (cache, reference):
            kv_cache.advance(accepted)
        # unchanged until the next forward begins
        assert cache.boundary == max(0, (cache.length - accepted - recent) // block * block)
        link.drain()
        stored = torch.cat(
            (
                host_kv(cache)[:, :, :, : cache.boundary],
                cache.buffers.tails[:, :, :, : cache.length - cache.boundary],
            ),
            dim=3,
        )
        torch.testing.assert_close(stored.transpose(2, 3), reference.kv[1::2], atol=1e-5, rtol=1e-5)
    assert cache.boundary >= 48


@every_link
@every_split
@pytest.mark.parametrize("prompt", [4, 17, 50])
def test_link_traffic(link: Link, resident: int, prompt: int) -> None:
    cache = tiered_cache(link, resident)
    offloaded = LAYERS - resident
    prefill(cache, random_qkv(prompt), chunk=16)
    assert cache.traffic.link_in == 0  # prefill is layer-major: nothing is read back
    assert cache.traffic.link_out == LAYOUT.bytes(boundary_at(prompt), offloaded)
    streamed = 0
    for rows, accepted in [(5, 5), (17, 12), (1, 1), (17, 17), (24, 0), (24, 24), (1, 1)]:
        boundary = boundary_at(cache.length)
        streamed += LAYOUT.bytes(boundary, offloaded)
        forward(cache, random_qkv(rows))
        cache.advance(accepted)
        # every token of the prefix left once, in prefill or a later forward
        assert (cache.traffic.link_in, cache.traffic.link_out) == (
            streamed,
            LAYOUT.bytes(boundary, offloaded),
        )
    assert boundary > boundary_at(prompt)  # it has moved


@every_link
@every_split
def test_attended_bytes(link: Link, resident: int) -> None:
    cache = tiered_cache(link, resident)
    prefill(cache, random_qkv(50), chunk=50)
    before = cache.traffic.attended
    assert before == LAYOUT.bytes(50)
    forward(cache, random_qkv(7))
    assert cache.traffic.attended - before == LAYOUT.bytes(57)


@every_split
@pytest.mark.parametrize("link", ["emulated"], indirect=True)
def test_device_bytes(link: Link, resident: int) -> None:
    cache = tiered_cache(link, resident)
    offloaded = LAYERS - resident
    # 3 slots of keys and values of 2 heads
    ring = 3 * 2 * 2 * CAPACITY * LAYOUT.head_dim * 4 if offloaded else 0
    assert (
        cache.device_bytes
        == LAYOUT.bytes(CAPACITY, resident) + LAYOUT.bytes(TAIL, offloaded) + ring
    )


def test_bfloat16_agrees_with_plain_arithmetic() -> None:
    layout = KVLayout(2, 2, 16, torch.bfloat16)
    link = make_test_link("delaying")
    cache, reference = tiered_cache(link, 1, layout=layout), plain_cache(layout)
    prompt, tokens = random_qkv(60, layout), random_qkv(9, layout)
    torch.testing.assert_close(
        prefill(cache, prompt, 16), forward(reference, prompt), atol=2e-2, rtol=2e-2
    )
    reference.advance(60)
    torch.testing.assert_close(
        forward(cache, tokens), forward(reference, tokens), atol=2e-2, rtol=2e-2
    )
    link.close()


def test_exceeding_a_capacity_is_an_error() -> None:
    cache = tiered_cache(make_test_link("view"), resident=1)
    with (
        pytest.raises(ValueError, match="0 tokens and 201 more do not fit a cache of 200"),
        Prefill(cache, CAPACITY + 1),
    ):
        pass
    with pytest.raises(ValueError, match=f"do not fit a buffer of {TAIL}"):
        forward(cache, random_qkv(TAIL + 1))
    prefill(cache, random_qkv(CAPACITY - 3), chunk=64)
    with pytest.raises(ValueError, match="197 tokens and 4 more do not fit a cache of 200"):
        cache.begin_forward(4)
    with pytest.raises(ValueError, match="197 tokens and 4 more do not"), Prefill(cache, 4):
        pass
