"""Caches with a slot per token, and their short forwards in static shapes.

A forward whose shapes, addresses and launches are the same at any length can be captured once and
replayed: as a CUDA graph it costs one launch instead of hundreds. So positions are read from device
memory here, and attention covers the whole buffer, with slots that are not visible masked out (as
in gpt-fast's static cache).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from offload.attention import masked_attention
from offload.attention.head_major import attend_by_heads
from offload.cache.base import Cache
from offload.rotary import Rotary


class StaticCache(Cache):
    """A cache with a slot for each token that a forward attends to, as `StaticForward` needs."""

    slots: int  # tokens per head that a forward may attend to
    window_offset = 0  # first slot of a layer's own buffer
    rotary: Rotary

    @abstractmethod
    def slot_and_position(self, start: int) -> tuple[int, int]:
        """Return the slot of the token at `start`, and the position to rotate it at.

        Those of the tokens after it are consecutive.
        """

    @abstractmethod
    def buffers(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the layer's KV (2, Hkv, slots, D), and its keys before rotation if it keeps them.

        Those are (Hkv, slots, D). All keep their addresses, and every slot's content is finite. The
        slots before `window_offset` are not included.
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
        yield slice(None), kv


class StaticForward:
    """Forwards of `rows` tokens on a cache; after `prepare`, everything else can be captured."""

    length = 0  # unused: the start is in device memory
    is_batch_invariant = False

    def __init__(self, cache: StaticCache, rows: int):
        kv, _ = cache.buffers(0)
        device = kv.device
        self._cache = cache
        # (3, 1): slot and position of the first token, and the first valid slot
        self._start = torch.zeros(3, 1, dtype=torch.int64, device=device)
        self._first = 0  # slot of the first token, on the host
        self._steps = torch.arange(rows, device=device)
        self._columns = torch.arange(cache.slots, device=device)

    def prepare(self, skipped: int = 0) -> None:
        """Set the next forward to start after the cached tokens, and `skipped` others."""
        cache = self._cache
        rows = len(self._steps)
        cache.begin_forward(skipped + rows)
        slot, position = cache.slot_and_position(cache.length + skipped)
        if not cache.has_room(skipped + rows):  # a sliding cache raises in `begin_forward`
            raise ValueError(f"{rows} tokens at slot {slot} do not fit a buffer of {cache.slots}")
        self._first = slot
        for tensor, value in zip(
            self._start, (slot, position, cache.first_valid_slot()), strict=True
        ):
            tensor.fill_(value)
        cache.traffic.attended += cache.slot_bytes(0, cache.slots)

    def rows(self) -> Tensor:
        """Return the first layer's KV of these tokens (2, Hkv, T, D), as a view of the buffer.

        A forward should write it.
        """
        kv, _ = self._cache.buffers(0)
        first = self._first - self._cache.window_offset
        return kv[:, :, first : first + len(self._steps)]

    def begin_forward(self, rows: int) -> None:
        """Compute slots, angles and mask from the start in device memory."""
        slot, position, first_valid_slot = self._start
        slots = slot + self._steps  # (T,)
        self._slots = slots - self._cache.window_offset  # slots in a layer's own buffer
        self._angles = self._cache.rotary.angles(position + self._steps)
        future = self._columns > slots[:, None]  # (T, slots)
        hidden = future | (self._columns < first_valid_slot)
        mask = torch.zeros_like(hidden, dtype=torch.float32)
        self._mask = mask.masked_fill(hidden, -torch.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Write the tokens' KV and return their attention, as `Cache.attend`; `start` is unused."""
        kv, raw = self._cache.buffers(layer)
        rotary = self._cache.rotary
        self._write(kv[0], rotary.apply(k, self._angles, layer))
        self._write(kv[1], v)
        if raw is not None:
            self._write(raw, k)
        q = rotary.apply(q, self._angles, layer)
        return attend_by_heads(q, kv.shape[1], self._cache.head_groups(layer), self._masked)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = masked_attention(q, k, v, self._mask)
        return out

    def _write(self, buffer: Tensor, x: Tensor) -> None:
        """Write x (T, Hkv, D) to the tokens' slots of a buffer (Hkv, slots, D)."""
        buffer.index_copy_(1, self._slots, x.transpose(0, 1))
