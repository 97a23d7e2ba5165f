"""Caches in which every token has a slot, and their short passes in fixed shapes.

A pass whose shapes, addresses and launches are the same wherever the text stands can be recorded
once and replayed: as a CUDA graph it costs one launch instead of hundreds. So positions come from
device memory here, and a pass attends to the whole buffer, slots that hold nothing for it masked
out (as in gpt-fast's static cache).
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
    """A cache with a slot for each token that a pass attends to, as a `StaticForward` asks for it."""

    slots: int  # tokens a head that a pass may attend to
    window_offset = 0  # the slot that a layer's own buffer begins with
    rotary: Rotary

    @abstractmethod
    def slot_and_position(self, start: int) -> tuple[int, int]:
        """Return the slot of the token at `start`, and the position to rotate it at.

        The tokens behind it follow on.
        """

    @abstractmethod
    def buffers(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the layer's KV (2, Hkv, slots, D) and its keys as computed, if it keeps them.

        Those are (Hkv, slots, D). All keep their addresses; whatever a slot holds is finite. The
        slots before `window_offset` are not in it.
        """

    def has_room(self, rows: int) -> bool:
        """Return whether a pass of so many tokens would fit behind what the cache holds."""
        slot, position = self.slot_and_position(self.length)
        return slot + rows <= self.slots and position + rows <= self.rotary.length

    def first_valid_slot(self) -> int:
        """Return the first slot that holds a token."""
        return 0

    def slot_bytes(self, first: int, end: int) -> int:
        """Return the bytes that all layers keep in the slots from `first` to `end`."""
        return self.layout.bytes(end - first)

    def head_groups(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield heads of a layer, and their KV (2, h, slots, D) in all slots.

        What is yielded is good until the next is asked for.
        """
        kv, _ = self.buffers(layer)
        yield slice(None), kv


class StaticForward:
    """Passes of `rows` tokens on a cache. `prepare` goes before each; all else may be recorded."""

    length = 0  # where a pass starts is in device memory
    is_batch_invariant = False

    def __init__(self, cache: StaticCache, rows: int):
        kv, _ = cache.buffers(0)
        device = kv.device
        self._cache = cache
        # (3, 1): slot and position of the first row, and the first slot that holds a token
        self._start = torch.zeros(3, 1, dtype=torch.int64, device=device)
        self._first = 0  # the slot of the first row, as `prepare` knows it
        self._steps = torch.arange(rows, device=device)
        self._columns = torch.arange(cache.slots, device=device)

    def prepare(self) -> None:
        """Set the next pass behind what the cache holds now."""
        cache = self._cache
        rows = len(self._steps)
        cache.begin_forward(rows)
        slot, position = cache.slot_and_position(cache.length)
        if not cache.has_room(rows):  # of a cache that slides `begin` tells
            raise ValueError(f"{rows} tokens at slot {slot} do not fit a buffer of {cache.slots}")
        self._first = slot
        for own, value in zip(self._start, (slot, position, cache.first_valid_slot()), strict=True):
            own.fill_(value)
        cache.traffic.attended += cache.slot_bytes(0, cache.slots)

    def rows(self) -> Tensor:
        """Return the first layer's KV of these tokens (2, Hkv, T, D), in the buffer itself.

        A pass should write it there.
        """
        kv, _ = self._cache.buffers(0)
        first = self._first - self._cache.window_offset
        return kv[:, :, first : first + len(self._steps)]

    def begin_forward(self, rows: int) -> None:
        """Start a pass, as models do: find slots, angles and mask from what is in device memory."""
        slot, position, first_valid_slot = self._start
        slots = slot + self._steps  # (T,)
        self._where = slots - self._cache.window_offset  # in a layer's own buffer
        self._angles = self._cache.rotary.angles(position + self._steps)
        later = self._columns > slots[:, None]  # (T, slots)
        unseen = later | (self._columns < first_valid_slot)
        mask = torch.zeros_like(unseen, dtype=torch.float32)
        self._mask = mask.masked_fill(unseen, -torch.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Write the rows' KV and return their attention, as `Cache.attend`; `start` is unused."""
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
        """Write x (T, Hkv, D) to the rows' slots of a buffer (Hkv, slots, D)."""
        buffer.index_copy_(1, self._where, x.transpose(0, 1))
