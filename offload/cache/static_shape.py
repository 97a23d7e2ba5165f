"""Caches with a slot per token, and their short forwards in static shapes.

A forward whose shapes, addresses and launches are the same at any length can be captured once and
replayed: as a CUDA graph it costs one launch instead of hundreds. So positions are read from device
memory here, and attention covers the whole buffer, with slots that are not visible masked out (as
in gpt-fast's static cache).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.attention import masked_attention
from offload.attention.head_major import attend_by_heads, token_slice
from offload.cache.base import Cache
from offload.rotary import Rotary


class StaticCache(Cache):
    """A cache with a slot for each token that a forward attends to, as `StaticForward` needs.

    Its buffers have one slot more: padding is written there, and it is never attended to.
    """

    slots: int  # tokens per head that a forward may attend to, without the slot for padding
    window_offset = 0  # first slot of a layer's own buffer
    rotary: Rotary

    @abstractmethod
    def slot_and_position(self, start: int) -> tuple[int, int]:
        """Return the slot of the token at `start`, and the position to rotate it at.

        Those of the tokens after it are consecutive.
        """

    @abstractmethod
    def buffers(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the layer's KV (2, Hkv, n, D), and its keys before rotation if it keeps them.

        Those are (Hkv, n, D). The n slots are those from `window_offset` on, and the one for
        padding. All keep their addresses, and every slot's content is finite.
        """

    def has_room(self, rows: int) -> bool:
        """Return whether a forward of `rows` tokens would fit after the cached ones."""
        slot, position = self.slot_and_position(self.length)
        return slot + rows <= self.slots and position + rows <= self.rotary.length

    def first_valid_slot(self) -> int:
        """Return the first slot that holds a token."""
        return 0

    def slot_bytes(self, first: int, end: int) -> int:
        """Return the bytes of all layers in the slots from `first` to `end`."""
        return self.layout.bytes(end - first)

    def head_groups(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield heads of a layer, and their KV (2, h, slots, D) in all slots.

        The KV is valid until the next is yielded.
        """
        kv, _ = self.buffers(layer)
        yield slice(None), token_slice(kv, 0, self.slots)


@dataclass(frozen=True)
class Place:
    """The place of a forward's `tokens` tokens in a cache; 0 tokens leave the cache as it is."""

    tokens: int
    slot: int = 0  # the first token's
    position: int = 0  # the first token's
    first_valid_slot: int = 0

    @classmethod
    def after(cls, cache: StaticCache, tokens: int) -> Place:
        """Place the next forward's tokens after the cached ones; count the bytes it attends to.

        Raises ValueError if they do not fit.
        """
        cache.begin_forward(tokens)
        slot, position = cache.slot_and_position(cache.length)
        if not cache.has_room(tokens):  # a sliding cache raises in `begin_forward`
            raise ValueError(f"{tokens} tokens at slot {slot} do not fit a buffer of {cache.slots}")
        cache.traffic.attended += cache.slot_bytes(0, cache.slots)
        return cls(tokens, slot, position, cache.first_valid_slot())


class StaticForward:
    """Forwards of up to `rows` tokens on a cache; after `place`, everything else can be captured.

    Tokens that a forward lacks are padding, whose results are of no use.
    """

    length = 0  # unused: the start is in device memory
    is_batch_invariant = False

    def __init__(self, cache: StaticCache, rows: int):
        kv, _ = cache.buffers(0)
        self.cache = cache
        # (3, 1): number of tokens, slot of the first one, and the first valid slot
        self._start = torch.zeros(3, 1, dtype=torch.int64, device=kv.device)
        self._steps = torch.arange(rows, device=kv.device)
        self._columns = torch.arange(cache.slots, device=kv.device)
        # copied from the sequence's tables: the next sequence on this cache has others
        cos, sin = cache.rotary.angles(0, 1)
        self._angles = cos.repeat(rows, 1, 1), sin.repeat(rows, 1, 1)

    def place(self, place: Place) -> None:
        """Set where the next forward's tokens are."""
        numbers = (place.tokens, place.slot, place.first_valid_slot)
        for tensor, number in zip(self._start, numbers, strict=True):
            tensor.fill_(number)
        own = self.cache.rotary.angles(place.position, place.position + place.tokens)
        for angles, rows in zip(self._angles, own, strict=True):
            angles[: place.tokens].copy_(rows)

    def written(self, place: Place) -> Tensor:
        """Return the first layer's KV of tokens placed there (2, Hkv, T, D), a view of the buffer.

        A forward should write it.
        """
        kv, _ = self.cache.buffers(0)
        first = place.slot - self.cache.window_offset
        return token_slice(kv, first, first + place.tokens)

    def begin_forward(self, rows: int) -> None:
        """Compute slots and mask from the start in device memory."""
        tokens, slot, first_valid_slot = self._start
        scratch = self.cache.slots
        slots = torch.where(self._steps < tokens, slot + self._steps, scratch)  # (T,)
        self._slots = slots - self.cache.window_offset  # slots in a layer's own buffer
        future = self._columns > slots[:, None]  # (T, slots)
        hidden = future | (self._columns < first_valid_slot)
        mask = torch.zeros_like(hidden, dtype=torch.float32)
        self._mask = mask.masked_fill(hidden, -torch.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Write the tokens' KV and return their attention, as `Cache.attend`; `start` is unused."""
        kv, raw = self.cache.buffers(layer)
        rotary = self.cache.rotary
        self._write(kv[0], rotary.apply(k, self._angles, layer))
        self._write(kv[1], v)
        if raw is not None:
            self._write(raw, k)
        q = rotary.apply(q, self._angles, layer)
        return attend_by_heads(q, k.shape[1], self.cache.head_groups(layer), self._masked)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = masked_attention(q, k, v, self._mask)
        return out

    def _write(self, buffer: Tensor, x: Tensor) -> None:
        """Write x (T, Hkv, D) to the tokens' slots of a buffer (Hkv, slots, D)."""
        buffer.index_copy_(1, self._slots, x.transpose(0, 1))
