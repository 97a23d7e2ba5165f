"""Tiers change where KV lives, never what attention gives; and every byte that crosses the link is
counted.
"""

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
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from offload.tiered.shape import TieredCacheSpec
from support.driving import (
    BLOCK,
    CAPACITY,
    LAYOUT,
    RECENT,
    TAIL,
    forward,
    forward_alike,
    plain,
    prefill,
    text,
    tiered,
)
from support.links import DelayingLink, every_link, make_test_link
from support.slow import slow_except

LAYERS = LAYOUT.layers
every_split = pytest.mark.parametrize("resident", range(LAYERS + 1))
# rows of a pass, how many of them stand, and where to crop afterwards (None: nowhere). The boundary
# moves by 12 tokens.
PASSES = [
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
    """Whole blocks that leave RECENT tokens behind them."""
    return max(0, length - RECENT) // BLOCK * BLOCK


def on_host(cache: TieredCache) -> Tensor:
    """What the host holds of layers that are streamed, (L, 2, Hkv, capacity, D)."""
    return cache.host.view(cache.layout.shape(cache.shape.offloaded_layers, cache.shape.capacity))


@every_link
@every_split
@pytest.mark.parametrize("slot_heads", slow_except([1, 2, 3], 1))
def test_outputs_do_not_depend_on_the_tiers(link: Link, resident: int, slot_heads: int) -> None:
    cache, want = tiered(link, resident, slot_heads=slot_heads), plain()
    prompt = text(50)
    torch.testing.assert_close(
        prefill(cache, prompt, chunk=16), forward(want, prompt), atol=1e-5, rtol=1e-5
    )
    want.advance(50)
    for rows, stand, crop in PASSES * 2:
        forward_alike(cache, want, rows, stand, crop)
        assert cache.length == want.length


@every_link
def test_a_cache_need_not_be_prefilled(link: Link) -> None:
    cache, want = tiered(link, resident=1), plain()
    for rows in [24, 1, 20, 3, 17, 1]:
        forward_alike(cache, want, rows, rows)


@every_link
def test_a_repeated_pass_repeats_its_output(link: Link) -> None:
    cache = tiered(link, resident=1)
    prefill(cache, text(40), chunk=40)
    tokens, longer = text(3), text(9)
    first = forward(cache, tokens)
    forward(cache, longer)  # never advanced: it did not happen
    assert torch.equal(forward(cache, tokens), first)


@every_link
def test_a_pass_given_up_halfway_leaves_nothing_behind(link: Link) -> None:
    cache, want = tiered(link, resident=1), plain()
    prompt = text(50)
    prefill(cache, prompt, chunk=13)
    forward(want, prompt)
    want.advance(50)
    for layers, rows in product([1, 2, 3], [1, 4]):
        cache.begin_forward(rows)
        for layer, qkv in enumerate(text(rows)[:layers]):
            cache.attend(layer, *qkv, cache.length)
        tokens = text(7)
        torch.testing.assert_close(
            forward(cache, tokens), forward(want, tokens), atol=1e-5, rtol=1e-5
        )
        cache.advance(7)
        want.advance(7)


@every_link
def test_a_cache_can_start_over(link: Link) -> None:
    cache = tiered(link, resident=1)
    for length in (70, 30, 90):
        want, prompt, tokens = plain(), text(length), text(5)
        torch.testing.assert_close(
            prefill(cache, prompt, chunk=16), forward(want, prompt), atol=1e-5, rtol=1e-5
        )
        want.advance(length)
        torch.testing.assert_close(
            forward(cache, tokens), forward(want, tokens), atol=1e-5, rtol=1e-5
        )
        cache.begin_forward(
            1
        )  # copies are on their way into the slots that prefill is about to use
        cache.crop(0)


class RememberingLink(DelayingLink):
    """Keeps the ticket of every copy."""

    def copy(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._noted(super().copy(pairs))

    def copy_out(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._noted(super().copy_out(pairs))

    def _noted(self, ticket: threading.Event) -> threading.Event:
        self.tickets = [*getattr(self, "tickets", []), ticket]
        return self.tickets[-1]


def test_copies_are_over_before_their_memory_is_anothers() -> None:
    link = RememberingLink(delay=1e-2)
    arena = HostArena(link, LAYOUT.dtype)
    cache = TieredCache(TieredCacheSpec(LAYOUT, 90, 1, block=16), link, plain().rotary, arena)
    prefill(cache, text(80), chunk=16)
    assert all(ticket.is_set() for ticket in link.tickets)
    cache.begin_forward(1)
    cache.crop(0)
    with Prefill(cache, 80):  # builds its layers in the memory of the slots
        assert all(ticket.is_set() for ticket in link.tickets)
    cache.begin_forward(1)
    arena.allocate((5,))
    assert all(ticket.is_set() for ticket in link.tickets)
    link.close()


@every_link
def test_documents_share_an_arena(link: Link) -> None:
    arena = HostArena(link, LAYOUT.dtype)
    for capacity in (90, 40, 120):
        want = plain()
        shape = TieredCacheSpec(LAYOUT, capacity, 1, recent=3, block=8, rows=5, copies=link.copies)
        cache = TieredCache(shape, link, want.rotary, arena)
        prompt, tokens = text(capacity - 10), text(5)
        prefill(cache, prompt, chunk=16)
        forward(want, prompt)
        want.advance(capacity - 10)
        torch.testing.assert_close(
            forward(cache, tokens), forward(want, tokens), atol=1e-5, rtol=1e-5
        )
        cache.begin_forward(1)  # its copies are on their way when the next document begins
    assert arena.nbytes == LAYOUT.bytes(120, LAYERS - 1)


@every_link
@pytest.mark.parametrize("prompt", [3, 17, 50, 53, 65])
def test_after_prefill_the_host_has_the_prefix_and_the_tail_the_rest(
    link: Link, prompt: int
) -> None:
    cache, want, boundary = tiered(link, resident=1), plain(), boundary_at(prompt)
    tokens = text(prompt)
    prefill(cache, tokens, chunk=16)
    # (L - 1, 2, Hkv, T, D), read at once: no copy may be under way any more
    stored = on_host(cache)[:, :, :, :boundary].clone()
    tail = cache._tails[:, :, :, : prompt - boundary]
    forward(want, tokens)
    want.advance(prompt)
    assert cache.boundary == boundary
    torch.testing.assert_close(
        torch.cat((stored, tail), dim=3).transpose(2, 3), want.kv[1:], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("layers", [1, 2, 6, 32, 40])
def test_resident_layers_are_spread_evenly_and_the_first_is_one(layers: int) -> None:
    for resident in range(layers + 1):
        shape = TieredCacheSpec(replace(LAYOUT, layers=layers), CAPACITY, resident)
        near = [layer for layer, kind in enumerate(shape.placement()) if kind == "resident"]
        assert len(near) == resident
        assert not resident or near[0] == 0
        gaps = [after - before for before, after in pairwise([*near, layers])]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1


@every_link
@pytest.mark.parametrize(("recent", "block"), [(0, 1), (0, 12), (7, 1), (5, 12), (30, 4)])
def test_the_boundary_moves_as_far_as_it_may_when_a_pass_begins(
    link: Link, recent: int, block: int
) -> None:
    cache, want = tiered(link, 2, recent=recent, block=block), plain()
    for rows, stand in [
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
        tokens, before = text(rows), cache.boundary
        out = forward(cache, tokens)
        assert cache.boundary == max(0, (cache.length - recent) // block * block) >= before
        torch.testing.assert_close(out, forward(want, tokens), atol=1e-5, rtol=1e-5)
        for each in (cache, want):
            each.advance(stand)
        # until the next pass begins
        assert cache.boundary == max(0, (cache.length - stand - recent) // block * block)
        link.drain()
        both = torch.cat(
            (
                on_host(cache)[:, :, :, : cache.boundary],
                cache._tails[:, :, :, : cache.length - cache.boundary],
            ),
            dim=3,
        )
        torch.testing.assert_close(both.transpose(2, 3), want.kv[1::2], atol=1e-5, rtol=1e-5)
    assert cache.boundary >= 48


@every_link
@every_split
@pytest.mark.parametrize("prompt", [4, 17, 50])
def test_bytes_over_the_link(link: Link, resident: int, prompt: int) -> None:
    cache, far = tiered(link, resident), LAYERS - resident
    prefill(cache, text(prompt), chunk=16)
    assert cache.traffic.link_in == 0  # layer-major: nothing is read back
    assert cache.traffic.link_out == LAYOUT.bytes(boundary_at(prompt), far)
    came = 0
    for rows, stand in [(5, 5), (17, 12), (1, 1), (17, 17), (24, 0), (24, 24), (1, 1)]:
        boundary = boundary_at(cache.length)
        came += LAYOUT.bytes(boundary, far)
        forward(cache, text(rows))
        cache.advance(stand)
        # every token of the prefix left once, whether prefill wrote it or a later pass
        assert (cache.traffic.link_in, cache.traffic.link_out) == (
            came,
            LAYOUT.bytes(boundary, far),
        )
    assert boundary > boundary_at(prompt)  # it moved on the way


@every_link
@every_split
def test_bytes_attended(link: Link, resident: int) -> None:
    cache = tiered(link, resident)
    prefill(cache, text(50), chunk=50)
    before = cache.traffic.attended
    assert before == LAYOUT.bytes(50)
    forward(cache, text(7))
    assert cache.traffic.attended - before == LAYOUT.bytes(57)


@every_split
@pytest.mark.parametrize("link", ["emulated"], indirect=True)
def test_device_bytes(link: Link, resident: int) -> None:
    cache, far = tiered(link, resident), LAYERS - resident
    # 3 slots of keys and values of 2 heads
    ring = 3 * 2 * 2 * CAPACITY * LAYOUT.head_dim * 4 if far else 0
    assert cache.device_bytes == LAYOUT.bytes(CAPACITY, resident) + LAYOUT.bytes(TAIL, far) + ring


def test_bfloat16_agrees_with_plain_arithmetic() -> None:
    layout = KVLayout(2, 2, 16, torch.bfloat16)
    link = make_test_link("delaying")
    cache, want = tiered(link, 1, layout=layout), plain(layout)
    prompt, tokens = text(60, layout), text(9, layout)
    torch.testing.assert_close(
        prefill(cache, prompt, 16), forward(want, prompt), atol=2e-2, rtol=2e-2
    )
    want.advance(60)
    torch.testing.assert_close(forward(cache, tokens), forward(want, tokens), atol=2e-2, rtol=2e-2)
    link.close()


def test_refusals() -> None:
    cache = tiered(make_test_link("view"), resident=1)
    with (
        pytest.raises(ValueError, match="0 tokens and 201 more do not fit a cache of 200"),
        Prefill(cache, CAPACITY + 1),
    ):
        pass
    with pytest.raises(ValueError, match=f"do not fit a buffer of {TAIL}"):
        forward(cache, text(TAIL + 1))
    prefill(cache, text(CAPACITY - 3), chunk=64)
    with pytest.raises(ValueError, match="197 tokens and 4 more do not fit a cache of 200"):
        cache.begin_forward(4)
    with pytest.raises(ValueError, match="197 tokens and 4 more do not"), Prefill(cache, 4):
        pass
