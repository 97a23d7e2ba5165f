"""Caches with a slot per token, whose short forwards can have static shapes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from offload.attention.head_major import token_slice
from offload.cache.base import Cache
from offload.cache.target_forward import TargetForward
from offload.rotary import Rotary


class SlotBuffers(NamedTuple):
    """One layer's buffers of a StaticCache, all contiguous.

    The m slots in 8 bits are before those of KV, which start at `StaticCache.window_offset`.
    """

    kv: Tensor  # (2, Hkv, n, D); the last slot is for padding
    raw: Tensor | None = None  # (Hkv, n, D), keys before rotation, if the cache keeps them
    codes: Tensor | None = None  # (2, Hkv, m, D) int8, as of `offload.codec.int8`
    scales: Tensor | None = None  # (2, Hkv, m, 1)


class WindowedSlot(NamedTuple):
    """The slot of a token in layers with a window."""

    slot: int
    first_valid: int  # the first slot that holds a token
    slots: int  # their number, without the one for padding


class StaticCache(Cache):
    """A cache with a slot for each token that a forward attends to, as a `StaticForward` needs.

    Its buffers have one slot more: padding is written there, and it is never attended to.
    """

    slots: int  # tokens per head that a forward may attend to, without the slot for padding
    window_offset = 0  # first slot of a layer's own buffer
    rotary: Rotary
    target_forward: TargetForward | None = None  # the target's, if the cache observes it

    @abstractmethod
    def slot_and_position(self, start: int) -> tuple[int, int]:
        """Return the slot of the token at `start`, and the position to rotate it at.

        Those of the tokens after it are consecutive.
        """

    @abstractmethod
    def buffers(self, layer: int) -> SlotBuffers:
        """Return the layer's buffers. They keep their addresses; every slot's content is finite."""

    def windowed_slot(self, start: int) -> WindowedSlot:
        """Return the slot of the token at `start` in layers with a window."""
        slot, _ = self.slot_and_position(start)
        return WindowedSlot(slot, self.first_valid_slot(), self.slots)

    def keep_first_hidden_states(self, states: Tensor, start: Tensor, tokens: Tensor) -> None:
        """Keep hidden states as `keep_hidden_states` does, in a captured forward.

        The first `tokens` of states (T, hidden) are those from position `start` on; both are
        scalars on the device.
        """
        if self.hidden_states is not None:
            self.hidden_states.write_first(states, start, tokens)

    def has_room(self, rows: int) -> bool:
        """Return whether a forward of `rows` tokens would fit after the cached ones."""
        # while layers differ, a forward has no one slot, or must not write all of its tokens
        if self.target_forward is not None and not self.target_forward.is_over:
            return False
        slot, position = self.slot_and_position(self.length)
        windowed = self.windowed_slot(self.length)
        if self.layout.window is not None and windowed.slot + rows > windowed.slots:
            return False
        return slot + rows <= self.slots and position + rows <= self.rotary.length

    def first_valid_slot(self) -> int:
        """Return the first slot that holds a token."""
        return 0

    def slot_bytes(self, first: int, end: int) -> int:
        """Return the bytes of all layers in the slots from `first` to `end`."""
        return self.layout.bytes(end - first)

    def head_groups(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield heads of a layer, and their KV (2, h, slots, D) in all of its slots.

        The KV is valid until the next is yielded.
        """
        yield slice(None), token_slice(self.buffers(layer).kv, 0, self.slots)
