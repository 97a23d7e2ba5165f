"""A cache that is read on behind what it holds, or from somewhere inside it, is one that was read
at once.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from offload.layout import KVLayout
from offload.memory.link import Link
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from support.driving import (
    LAYOUT,
    QKV,
    ROWS,
    first,
    forward,
    joined,
    pair,
    prefill,
    text,
    tiered,
)
from support.links import every_link, make_test_link, worst_link
from support.slow import slow_except

every_seed = pytest.mark.parametrize("seed", slow_except([0, 1]))
BFLOAT16 = KVLayout(LAYOUT.layers, LAYOUT.heads, LAYOUT.head_dim, torch.bfloat16)
# resident layers, late ones, split ones, whether the others are packed
PLACES = [(0, 0, 0, False), (1, 0, 0, False), (2, 2, 0, False), (4, 0, 0, False)]
SPLIT = [
    (1, 0, 2, False),
    (0, 0, 4, False),
    (1, 0, 1, True),
    (2, 1, 0, True),
    (1, 2, 2, False),
    (0, 3, 4, False),
    (0, 1, 2, True),
]


def read_on(cache: TieredCache, tokens: list[QKV], rng: random.Random) -> Tensor:
    """Read tokens behind what the cache holds, in a pass where that is possible; (L, T, Hq, D)."""
    rows = len(tokens[0][0])
    if rows <= ROWS and cache.is_block_aligned and rng.random() < 0.5:
        out = forward(cache, tokens)
        cache.advance(rows)
        return out
    out = prefill(cache, tokens, chunk=rng.choice([7, 16, 64]))
    cache.onload_deferred()
    return out


def turns(cache: TieredCache, want: TieredCache, seed: int, close: bool) -> None:
    """Read a text on in `cache`, from anywhere in it, and all of it anew in `want`."""
    rng = random.Random(seed)
    layout = cache.layout
    story = text(rng.randint(1, 60), layout)
    read_on(cache, story, rng)
    for _ in range(9):
        most = min(len(story[0][0]), 140)
        kept = rng.choice([most, rng.randint(0, most)])
        cache.truncate(kept)
        turn = text(rng.randint(1, 50), layout)
        story = joined(first(story, kept), turn)
        found = read_on(cache, turn, rng)
        want.crop(0)
        expected = prefill(want, story, chunk=32)[:, kept:]
        want.onload_deferred()
        for _ in range(rng.randint(0, 3)):
            tokens = text(rng.randint(1, ROWS), layout)
            if cache.length + ROWS > cache.shape.capacity:
                break
            found = torch.cat((found, forward(cache, tokens)), dim=1)
            expected = torch.cat((expected, forward(want, tokens)), dim=1)
            stand = rng.randint(0, len(tokens[0][0]))
            cache.advance(stand)
            want.advance(stand)
            story = joined(story, first(tokens, stand))
        assert cache.length == want.length == len(story[0][0])
        tolerance = 1e-5 if close else 3e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@every_seed
@worst_link
@pytest.mark.parametrize(("resident", "deferred", "split", "compressed"), PLACES)
def test_outputs_are_those_of_a_text_read_at_once(
    link: Link, resident: int, deferred: int, split: int, compressed: bool, seed: int
) -> None:
    deferred = deferred if link.copies else 0
    cache = tiered(link, resident, deferred, split, compressed=compressed)
    turns(cache, tiered(make_test_link("view"), LAYOUT.layers), seed, close=True)


@every_seed
@worst_link
@pytest.mark.parametrize(
    ("resident", "deferred", "split", "compressed"), slow_except(SPLIT, 1, 4, 6)
)
def test_so_are_those_of_layers_in_slices(
    link: Link, resident: int, deferred: int, split: int, compressed: bool, seed: int
) -> None:
    deferred = deferred if link.copies else 0
    cache = tiered(link, resident, deferred, split, compressed=compressed, layout=BFLOAT16)
    want = tiered(make_test_link("view"), LAYOUT.layers, layout=BFLOAT16)
    turns(cache, want, seed, close=False)


@every_seed
@worst_link
@pytest.mark.parametrize(
    ("resident", "deferred", "split", "compressed"), slow_except(SPLIT, 1, 4, 6)
)
def test_slices_are_joined_to_the_very_elements(
    link: Link, resident: int, deferred: int, split: int, compressed: bool, seed: int
) -> None:
    """Where passes are the same, so are their outputs, bit for bit, wherever the text went back."""
    deferred = deferred if link.copies else 0
    rng = random.Random(seed)
    cache = tiered(link, resident, deferred, split, compressed=compressed, layout=BFLOAT16)
    want = tiered(link, resident, min(deferred, resident), layout=BFLOAT16)
    want.rotary = cache.rotary
    walk = [(0, 70), (70, 30), (100, 1), (97, 2), (98, 5), (103, 1), (99, 3), (102, 40)]
    for kept, count in walk + [(None, rng.randint(1, 40)) for _ in range(8)]:
        length = cache.length
        if kept is None:
            kept = max(0, min(length - rng.choice([0, 1, 5, 14, 60]), 150))
        turn = with_outliers(text(count, BFLOAT16))
        in_passes = rng.random() < 0.3 and count <= ROWS
        outs = []
        for each in (cache, want):
            each.truncate(kept)
            if in_passes and each.is_block_aligned:
                outs.append(forward(each, turn))
                each.advance(count)
            else:
                outs.append(prefill(each, turn, chunk=20))
            each.onload_deferred()
        assert torch.equal(*outs)


def with_outliers(tokens: list[QKV]) -> list[QKV]:
    """Make some keys tiny and some values huge, so that no code holds them."""
    for _, k, v in tokens:
        k[torch.rand(k.shape) < 0.02] *= 1e-6
        v[torch.rand(v.shape) < 0.02] *= 60
    return tokens


@pytest.mark.parametrize("link", ["emulated"], indirect=True)
@pytest.mark.parametrize("resident", range(LAYOUT.layers + 1))
def test_what_is_held_crosses_the_link_once(link: Link, resident: int) -> None:
    cache, far = tiered(link, resident), LAYOUT.layers - resident
    prefill(cache, text(100), chunk=16)
    before = cache.boundary
    sent = cache.traffic.link_out
    prefill(cache, text(70), chunk=16)
    assert cache.traffic.link_in == LAYOUT.bytes(before, far)
    # and what the boundary has passed leaves, once
    assert cache.traffic.link_out - sent == LAYOUT.bytes(cache.boundary - before, far)
    forward(cache, text(9))
    assert cache.traffic.link_in == LAYOUT.bytes(before + cache.boundary, far)


@every_link
def test_a_retrieval_cache_begins_anew(link: Link) -> None:
    """It holds what one holds behind a text that was read at once."""
    shape = RetrievalCacheSpec.of(24, 4, 200, ROWS, 60)
    target, retrieval = pair(link, 1, shape)
    story = text(90)
    prefill(target, story, chunk=200)
    for kept, count in [(90, 40), (50, 50), (30, 60), (3, 70)]:
        for _ in range(3):
            forward(target, text(3))
            target.advance(3)
        target.truncate(kept)
        turn = text(count)
        prefill(target, turn, chunk=200)
        story = joined(first(story, kept), turn)
        whole, want = pair(link, 1, shape)
        prefill(whole, story, chunk=200)
        assert retrieval.length == want.length == kept + count
        tokens = text(2)
        torch.testing.assert_close(forward(retrieval, tokens), forward(want, tokens))
        assert retrieval.selector.selections == 1


def test_refusals() -> None:
    cache = tiered(make_test_link("view"), resident=1)
    prefill(cache, text(150), chunk=64)
    with pytest.raises(ValueError, match="150 tokens and 51 more do not fit"), Prefill(cache, 51):
        pass
    cache.truncate(100)  # inside a block: passes may not go on from there
    assert not cache.is_block_aligned
    prefill(cache, text(3), chunk=3)
    assert cache.is_block_aligned
