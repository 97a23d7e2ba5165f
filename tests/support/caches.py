"""Caches of a model's KV, in tests without an engine."""

from __future__ import annotations

import torch

from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from parallel.model.transformer import Transformer
from support.links import make_test_link


def resident(
    model: Transformer,
    tokens: int,
    link: Link | None = None,
    resident_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> TieredCache:
    """Return a cache for `tokens` tokens, with `resident_layers` on the device, by default all."""
    link = link or make_test_link("view")
    layout = model.config.kv_layout(model.group.size, dtype, model.group.rank)
    count = layout.full_layers if resident_layers is None else resident_layers
    rotary = model.rotary(tokens, tokens)
    shape = TieredCacheSpec(layout, tokens, count, copies=link.copies, **sizes)
    return TieredCache(shape, link, rotary, HostArena(link, dtype))
