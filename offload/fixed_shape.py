"""Caches of one buffer a layer in which every token has a slot, and their short passes in fixed
shapes.

A pass whose shapes, addresses and launches are the same wherever the text stands can be recorded
once and replayed: as a CUDA graph it costs one launch instead of hundreds. So positions come from
device memory here, and a pass attends to the whole buffer, slots that hold nothing for it masked
out (as in gpt-fast's static cache).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from offload.attention import masked_attention
from offload.cache import Cache
from offload.rotary import Rotary, rotate


class SlotCache(Cache):
    """What a `FixedPass` asks of a cache."""

    slots: int  # tokens a head in a layer's buffer
    rotary: Rotary

    @abstractmethod
    def place(self, start: int) -> tuple[int, int]:
        """The slot of the token at `start`, and the position to rotate it at; the tokens behind it
        follow on.
        """

    @abstractmethod
    def buffers(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The layer's KV (2, Hkv, slots, D), and where there are: keys as computed (Hkv, slots, D),
        weights of keys in logarithms (Hkv, slots) float32. They keep their addresses, and whatever
        a slot holds is finite.
        """


class FixedPass:
    """Passes of `rows` tokens on a cache. `prepare` goes before each; all else may be recorded."""

    length = 0  # where a pass starts is in device memory

    def __init__(self, cache: SlotCache, rows: int):
        device = cache.buffers(0)[0].device
        self._cache = cache
        # of the first row
        self._slot, self._position = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._first = 0  # the slot of the first row, as `prepare` knows it
        self._steps, self._columns = (
            torch.arange(count, device=device) for count in (rows, cache.slots)
        )

    def prepare(self) -> None:
        """Set the next pass behind what the cache holds now."""
        cache, rows = self._cache, len(self._steps)
        cache.begin(rows)
        slot, position = cache.place(cache.length)
        if slot + rows > cache.slots or position + rows > cache.rotary.length:
            raise ValueError(f"{rows} tokens at slot {slot} do not fit a buffer of {cache.slots}")
        self._first = slot
        self._slot.fill_(slot)
        self._position.fill_(position)
        cache.traffic.attended += cache.layout.bytes(cache.slots)

    def rows(self) -> Tensor:
        """The first layer's KV of these tokens (2, Hkv, T, D), in the buffer itself: where a pass
        should write it.
        """
        return self._cache.buffers(0)[0][:, :, self._first : self._first + len(self._steps)]

    def begin(self, rows: int) -> None:
        self._where = self._slot + self._steps  # (T,)
        self._turns = self._cache.rotary.at(self._position + self._steps)
        later = self._columns > self._where[:, None]  # (T, slots)
        self._mask = torch.zeros_like(later, dtype=torch.float32).masked_fill(later, -torch.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        kv, raw, bias = self._cache.buffers(layer)
        for buffer, new in (
            (kv[0], rotate(k, *self._turns)),
            (kv[1], v),
            *([(raw, k)] if raw is not None else []),
        ):
            buffer.index_copy_(1, self._where, new.transpose(0, 1))
        # (1 or Hkv, T, slots)
        mask = self._mask[None] if bias is None else self._mask + bias[:, None]
        return masked_attention(
            rotate(q, *self._turns), kv[0].transpose(0, 1), kv[1].transpose(0, 1), mask
        )[0]
