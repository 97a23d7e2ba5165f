"""Driving caches without a model: random queries, keys and values stand for every layer's."""

from __future__ import annotations

import torch
from reference import PlainCache, random_rotary
from torch import Tensor

from offload import Cache, HostArena, KVLayout, Link, TieredCache

QKV = tuple[Tensor, Tensor, Tensor]
LAYOUT = KVLayout(layers=4, heads=3, head_dim=8, dtype=torch.float32)
GROUPS = 2  # query heads per KV head
CAPACITY = 200


def text(rows: int, layout: KVLayout = LAYOUT) -> list[QKV]:
    """What `rows` tokens bring to each layer: q (T, Hq, D), k and v (T, Hkv, D), none rotated. Never the same twice."""

    def normal(heads: int) -> Tensor:
        return torch.randn(rows, heads, layout.head_dim).to(layout.dtype)

    return [(normal(layout.heads * GROUPS), normal(layout.heads), normal(layout.heads)) for _ in range(layout.layers)]


def forward(cache: Cache, tokens: list[QKV]) -> Tensor:
    """One pass over all layers, as a model makes it; the tokens do not count yet. (L, T, Hq, D)"""
    cache.begin(len(tokens[0][0]))
    return torch.stack([cache.attend(layer, *qkv, cache.length) for layer, qkv in enumerate(tokens)])


def prefill(cache: TieredCache, tokens: list[QKV], chunk: int) -> Tensor:
    """Layer-major, as a model does it. (L, T, Hq, D)"""
    outs = []
    with cache.prefill(len(tokens[0][0])):
        for layer, qkv in enumerate(tokens):
            parts = zip(*(x.split(chunk) for x in qkv), strict=True)
            outs.append(torch.cat([cache.attend(layer, *part, index * chunk) for index, part in enumerate(parts)]))
    return torch.stack(outs)


def tiered(link: Link, resident: int, tail: int = 24, slot_heads: int = 2, layout: KVLayout = LAYOUT) -> TieredCache:
    """A cache whose sizes divide nothing evenly."""
    arena = HostArena(link, layout.dtype)
    return TieredCache(layout, CAPACITY, resident, link, random_rotary(layout, CAPACITY), arena, tail, slot_heads)


def plain(layout: KVLayout = LAYOUT) -> PlainCache:
    return PlainCache(layout, random_rotary(layout, CAPACITY))
