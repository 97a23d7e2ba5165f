"""Drive caches without a model, on random queries, keys and values of every layer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.attention.folding import Partial
from offload.cache.base import Cache
from offload.layout import KVLayout
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.prefill.layer_major import Prefill
from offload.retrieval.cache import RetrievalCache
from offload.retrieval.selection import POLICIES
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from support.reference import PlainCache, random_rotary

QKV = tuple[Tensor, Tensor, Tensor]
LAYOUT = KVLayout(layers=4, heads=3, head_dim=8, dtype=torch.float32)
BFLOAT16 = KVLayout(LAYOUT.layers, LAYOUT.heads, LAYOUT.head_dim, torch.bfloat16)
# resident, deferred and split layers, and whether the other layers are compressed
PLACEMENTS = [(0, 0, 0, False), (1, 0, 0, False), (2, 2, 0, False), (4, 0, 0, False)]
GROUPS = 2  # query heads per KV head
CAPACITY = 200
# minimum tokens after the boundary, its step, and query tokens of the largest forward
RECENT, BLOCK, ROWS = 5, 12, 24
TAIL = RECENT + BLOCK + ROWS
SHAPE = TieredCacheSpec(LAYOUT, CAPACITY, recent=RECENT, block=BLOCK, rows=ROWS, slot_heads=2)


def random_qkv(rows: int, layout: KVLayout = LAYOUT) -> list[QKV]:
    """Return random q (T, Hq, D), k and v (T, Hkv, D) of `rows` tokens, per layer, none rotated."""

    def random_layer(own: KVLayout) -> QKV:
        groups = GROUPS if layout.windowed_heads is None else own.groups
        heads = (own.heads * groups, own.heads, own.heads)
        return tuple(torch.randn(rows, each, own.head_dim).to(own.dtype) for each in heads)

    return [random_layer(layout.of(layer)) for layer in range(layout.layers)]


def concat(*sequences: list[QKV]) -> list[QKV]:
    """Concatenate sequences of tokens."""
    return [
        tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
        for layers in zip(*sequences, strict=True)
    ]


def first_tokens(tokens: list[QKV], count: int) -> list[QKV]:
    """Return the first `count` tokens of a sequence."""
    return [tuple(x[:count] for x in qkv) for qkv in tokens]


def stacked(outs: Sequence[Tensor]) -> Tensor:
    """Return each layer's output as one (L, T, Hq, D); heads of fewer dimensions end with zeros."""
    dim = max(out.shape[-1] for out in outs)
    return torch.stack([F.pad(out, (0, dim - out.shape[-1])) for out in outs])


def attended(cache: Cache, tokens: list[QKV]) -> Partial:
    """Run one forward over all layers, without advancing the cache.

    Returns the attention (L, T, Hq, D) and its log-sum-exp (L, T, Hq).
    """
    cache.begin_forward(len(tokens[0][0]))
    parts = [cache.attend(layer, *qkv, cache.length) for layer, qkv in enumerate(tokens)]
    outs, lses = zip(*parts, strict=True)
    return stacked(outs), torch.stack(lses)


def forward(cache: Cache, tokens: list[QKV]) -> Tensor:
    """Run one forward as `attended`, and return the attention alone."""
    return attended(cache, tokens)[0]


def assert_same_forward(
    cache: Cache, reference: PlainCache, rows: int, accepted: int, crop: int | None = None
) -> None:
    """Assert that a forward of `rows` random tokens gives the same output on both caches.

    They then advance by `accepted` tokens, and are cropped if `crop` is given.
    """
    tokens = random_qkv(rows, cache.layout)
    expected = attended(reference, tokens)
    torch.testing.assert_close(attended(cache, tokens), expected, atol=1e-5, rtol=1e-5)
    for kv_cache in (cache, reference):
        kv_cache.advance(accepted)
        if crop is not None:
            kv_cache.crop(crop)


def prefill(cache: TieredCache, tokens: list[QKV], chunk: int) -> Tensor:
    """Prefill layer by layer, as a model does. Returns (L, T, Hq, D)."""
    outs = []
    with Prefill(cache, len(tokens[0][0])) as context:
        for layer, qkv in enumerate(tokens):
            parts = enumerate(zip(*(x.split(chunk) for x in qkv), strict=True))
            rows = [context.attend(layer, *part, index * chunk)[0] for index, part in parts]
            outs.append(torch.cat(rows))
    return stacked(outs)


def tiered_cache(
    link: Link, resident: int, deferred: int = 0, split: int = 0, **options: Any
) -> TieredCache:
    """Return a cache with sizes that divide nothing evenly, unless `options` override them."""
    shape = replace(SHAPE, copies=link.copies, **options).with_placement(resident, deferred, split)
    rotary = random_rotary(shape.layout, shape.capacity)
    return TieredCache(shape, link, rotary, HostArena(link, shape.layout.dtype))


def plain_cache(layout: KVLayout = LAYOUT) -> PlainCache:
    """Return a reference cache."""
    return PlainCache(layout, random_rotary(layout, CAPACITY))


def cache_pair(
    link: Link,
    resident: int,
    shape: RetrievalCacheSpec,
    policy: str = "attention",
    min_interval: int = 1,
    layout: KVLayout = LAYOUT,
    deferred: int = 0,
) -> tuple[TieredCache, RetrievalCache]:
    """Return a target cache, and a retrieval cache that observes it."""
    target = tiered_cache(
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
    sequence: list[QKV],
    draft: int,
    rng: random.Random,
    check: Callable[[list[QKV], Tensor], None] | None = None,
) -> tuple[list[QKV], list[QKV]]:
    """Run one decoding round, and return the committed sequence and the one with rejected tokens.

    At most `draft` tokens are drafted on the middle level, which drops some of them itself, and
    verified with the pending token. check(sequence as of the middle level, output for its last
    tokens) is called after each forward of the middle level.
    """
    layout, length = target.layout, target.length
    known = sequence
    # the drafting level makes no forward for the last token of the draft
    end = length + rng.randint(1, draft)
    while middle.length < end:
        tokens = random_qkv(rng.randint(1, min(3, end - middle.length)), layout)
        rows = len(tokens[0][0])
        accepted = rng.randint(1, rows)
        out = forward(middle, tokens)
        if check is not None:
            check(concat(known, tokens), out)
        middle.advance(rows)
        middle.crop(middle.length - rows + accepted)
        known = concat(known, first_tokens(tokens, accepted))
    # the target's own keys and values at the same positions
    tokens = random_qkv(end - length + rng.randint(0, 1), layout)
    forward(target, tokens)
    accepted = rng.randint(1, len(tokens[0][0]))
    target.advance(accepted)
    return concat(sequence, first_tokens(tokens, accepted)), concat(sequence, tokens)
