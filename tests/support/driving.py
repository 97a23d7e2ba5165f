"""Driving caches without a model: random queries, keys and values stand for every layer's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.cache.base import Cache
from offload.layout import KVLayout
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.prefill import Prefill
from offload.tiered.shape import TieredCacheSpec
from support.reference import PlainCache, random_rotary

QKV = tuple[Tensor, Tensor, Tensor]
LAYOUT = KVLayout(layers=4, heads=3, head_dim=8, dtype=torch.float32)
GROUPS = 2  # query heads per KV head
CAPACITY = 200
# what stays behind the boundary, in what steps it moves, rows of the largest pass
RECENT, BLOCK, ROWS = 5, 12, 24
TAIL = RECENT + BLOCK + ROWS
SHAPE = TieredCacheSpec(LAYOUT, CAPACITY, recent=RECENT, block=BLOCK, rows=ROWS, slot_heads=2)


def text(rows: int, layout: KVLayout = LAYOUT) -> list[QKV]:
    """What `rows` tokens bring to each layer: q (T, Hq, D), k and v (T, Hkv, D), none rotated.
    Never the same twice.
    """

    def normal(heads: int) -> Tensor:
        return torch.randn(rows, heads, layout.head_dim).to(layout.dtype)

    return [
        (normal(layout.heads * GROUPS), normal(layout.heads), normal(layout.heads))
        for _ in range(layout.layers)
    ]


def joined(*texts: list[QKV]) -> list[QKV]:
    """One text behind the other."""
    return [
        tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
        for layers in zip(*texts, strict=True)
    ]


def first(tokens: list[QKV], count: int) -> list[QKV]:
    """The first `count` tokens of a text."""
    return [tuple(x[:count] for x in qkv) for qkv in tokens]


def forward(cache: Cache, tokens: list[QKV]) -> Tensor:
    """One pass over all layers, as a model makes it; the tokens do not count yet. (L, T, Hq, D)"""
    cache.begin_forward(len(tokens[0][0]))
    return torch.stack(
        [cache.attend(layer, *qkv, cache.length) for layer, qkv in enumerate(tokens)]
    )


def forward_alike(
    cache: Cache, want: PlainCache, rows: int, accepted: int, crop: int | None = None
) -> None:
    """Fails unless a forward of `rows` tokens gives the same on both caches, which then advance by
    those that are accepted, and are cropped.
    """
    tokens = text(rows)
    torch.testing.assert_close(forward(cache, tokens), forward(want, tokens), atol=1e-5, rtol=1e-5)
    for each in (cache, want):
        each.advance(accepted)
        if crop is not None:
            each.crop(crop)


def prefill(cache: TieredCache, tokens: list[QKV], chunk: int) -> Tensor:
    """Layer-major, as a model does it. (L, T, Hq, D)"""
    outs = []
    with Prefill(cache, len(tokens[0][0])) as reading:
        for layer, qkv in enumerate(tokens):
            parts = enumerate(zip(*(x.split(chunk) for x in qkv), strict=True))
            rows = [reading.attend(layer, *part, index * chunk) for index, part in parts]
            outs.append(torch.cat(rows))
    return torch.stack(outs)


def tiered(
    link: Link, resident: int, deferred: int = 0, split: int = 0, **choices: Any
) -> TieredCache:
    """Return a cache whose sizes divide nothing evenly, unless `choices` of its shape say so."""
    shape = replace(SHAPE, copies=link.copies, **choices).with_placement(resident, deferred, split)
    rotary = random_rotary(shape.layout, shape.capacity)
    return TieredCache(shape, link, rotary, HostArena(link, shape.layout.dtype))


def plain(layout: KVLayout = LAYOUT) -> PlainCache:
    return PlainCache(layout, random_rotary(layout, CAPACITY))


def pair(
    link: Link,
    resident: int,
    shape: RetrievalCacheSpec,
    policy: str = "attention",
    min_interval: int = 1,
    layout: KVLayout = LAYOUT,
    deferred: int = 0,
) -> tuple[TieredCache, RetrievalCache]:
    """A target's cache and the retrieval cache that follows it."""
    target = tiered(
        link,
        resident,
        deferred,
        recent=shape.window,
        block=shape.block,
        rows=shape.rows,
        layout=layout,
        capacity=shape.context,
    )
    retrieval = RetrievalCache(
        layout, shape, POLICIES[policy](), target.rotary, link.device, min_interval
    )
    target.observers.append(retrieval)
    return target, retrieval


def speculate(
    target: TieredCache,
    middle: RetrievalCache,
    story: list[QKV],
    draft: int,
    rng: random.Random,
    check: Callable[[list[QKV], Tensor], None] | None = None,
) -> tuple[list[QKV], list[QKV]]:
    """One round as decoders make it: at most `draft` tokens are drafted over the middle level,
    which takes some back itself, and verified with the pending one. Returns the text that stands
    then, and with it the rows that do not.

    check(text as the middle level knows it, what a pass over its last rows gave) sees every pass of
    the middle level.
    """
    layout, length, known = target.layout, target.length, story
    # of the draft; its last token is not read by the level that drafts
    end = length + rng.randint(1, draft)
    while middle.length < end:
        tokens = text(rng.randint(1, min(3, end - middle.length)), layout)
        rows, stand = len(tokens[0][0]), rng.randint(1, len(tokens[0][0]))
        out = forward(middle, tokens)
        if check is not None:
            check(joined(known, tokens), out)
        middle.advance(rows)
        middle.crop(middle.length - rows + stand)
        known = joined(known, first(tokens, stand))
    # the same positions, and other keys and values
    tokens = text(end - length + rng.randint(0, 1), layout)
    forward(target, tokens)
    stand = rng.randint(1, len(tokens[0][0]))
    target.advance(stand)
    return joined(story, first(tokens, stand)), joined(story, tokens)
