"""Fewer bits of the whole KV cache, to draft from: what slices are measured beside.

Rounded keys and values are held here in float32, so that nothing but the bits differs. How many
bits they would take is in their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.attention.head_major import attend_to, put, span
from offload.cache.base import Cache
from offload.codec.format import slice_format
from offload.codec.split_float import SliceCodec
from offload.tiered.cache import TieredCache

_BFLOAT16_MANTISSA = 7


@dataclass(frozen=True)
class Rounding:
    """A way to keep an element in fewer bits, and what is then missing to its 16."""

    round: Callable[[Tensor], Tensor]  # of keys and values (2, H, N, D)
    device_bits: float  # an element
    link_bits: float  # an element: what verification has to bring


def codes(kv: Tensor) -> Tensor:
    """Return what codes of these tokens stand for; a layer's have the offsets of its first ones."""
    cut = slice_format(torch.bfloat16)
    assert cut is not None
    codec, elements = SliceCodec(cut), kv.to(torch.bfloat16)
    offsets = codec.offsets(elements)
    held, _, _ = codec.split(elements, offsets)
    codec.join(held, None, offsets, elements)
    return elements.to(kv.dtype)


def mantissas(kv: Tensor, keys: int, values: int) -> Tensor:
    """Return bfloat16 rounded to so many bits of mantissa; exponents are as they were."""
    rounded = []
    for part, kept in zip(kv, (keys, values), strict=True):
        cut = _BFLOAT16_MANTISSA - kept
        pattern = part.to(torch.bfloat16).view(torch.int16).int()
        pattern += (1 << cut) >> 1
        pattern &= -(1 << cut)
        rounded.append(pattern.to(torch.int16).view(torch.bfloat16))
    return torch.stack(rounded).to(kv.dtype)


def affine(kv: Tensor, bits: int, group: int = 64) -> Tensor:
    """Return integers of so many bits between the least and the largest of a group.

    Keys are grouped by channel over tokens, values by token over channels. Source: KIVI (Liu et al.
    2024, arXiv 2402.02750), section 3.2.
    """
    keys, values = kv
    by_channel = _affine(keys.transpose(1, 2), bits, group)
    return torch.stack([by_channel.transpose(1, 2), _affine(values, bits, group)])


def _affine(x: Tensor, bits: int, group: int) -> Tensor:
    """Round x (..., n) in groups of the last dimension; a last group may be smaller."""
    rounded = []
    for part in x.split(group, dim=-1):
        low, high = part.aminmax(dim=-1, keepdim=True)
        step = (high - low).clamp_min(1e-12) / (2**bits - 1)
        rounded.append(((part - low) / step).round() * step + low)
    return torch.cat(rounded, dim=-1)


# what affine integers lack is not a slice of the element: all of it is brought
ROUNDINGS = {
    "codes, 8 bits": Rounding(codes, 8, 4),
    "codes, 8 of keys and 6 of values": Rounding(partial(mantissas, keys=3, values=1), 7, 5),
    "rounded to 7 bits": Rounding(partial(mantissas, keys=2, values=2), 7, 5),
    "affine int8, 8.5 bits": Rounding(partial(affine, bits=8), 8.5, 16),
    "affine int4, 4.5 bits": Rounding(partial(affine, bits=4), 4.5, 16),
}


class RoundedCache(Cache):
    """All of a target's KV, rounded; recent tokens are exact. It follows the target's cache."""

    _state = ("length", "_rounded")

    def __init__(self, target: TieredCache, rounding: Rounding):
        super().__init__(target.layout)
        self.rotary, self.rounding = target.rotary, rounding
        shape = target.layout.shape(target.layout.layers, target.shape.capacity)
        self._kv = torch.zeros(shape, dtype=target.layout.dtype)
        self._rounded = torch.zeros(target.layout.layers, dtype=torch.int64)  # tokens, by layer

    @property
    def device_bytes(self) -> int:
        return self._kv.nbytes

    def snapshot(self) -> dict[str, Any]:
        """Keep the recent tokens too: they may have been rounded when the cache comes back."""
        recent = span(self._kv, int(self._rounded.min()), self.length)
        return super().snapshot() | {"recent": recent.clone()}

    @torch.inference_mode()
    def restore(self, snapshot: dict[str, Any]) -> None:
        recent = snapshot["recent"]
        super().restore({name: value for name, value in snapshot.items() if name in self._state})
        span(self._kv, self.length - recent.shape[-2], self.length).copy_(recent)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        kv = self._kv[layer]
        put(kv, self.rotary(k, start, layer), v, start)
        q = self.rotary(q, start, layer)
        return attend_to(kv, q, start + len(q), self.traffic)[0]

    # -- following the target ----------------------------------------------------------------------

    def follow(self, boundary: int, length: int, end: int) -> None:
        pass

    def observe(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        if head or prefix.shape[1] != self.layout.heads:
            raise ValueError("a layer is seen whole, or it would be rounded in parts")
        kv, done, boundary = self._kv[layer], int(self._rounded[layer]), prefix.shape[2]
        if done < boundary:
            span(kv, done, boundary).copy_(self.rounding.round(span(prefix, done, boundary)))
            self._rounded[layer] = boundary
        span(kv, boundary, boundary + recent.shape[2]).copy_(recent)

    def advanced(self, length: int) -> None:
        self.length = length
