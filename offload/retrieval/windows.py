"""The KV of layers with a window beside a retrieval cache: their last tokens, with a slot each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import move_tokens, token_slice, write_tokens
from offload.attention.window import attend_slots
from offload.cache.static_shape import WindowedSlot
from offload.layout import KVLayout
from offload.retrieval.shape import RetrievalCacheSpec
from offload.traffic import ByteCounters


class RetrievalWindows:
    """A buffer (2, Hkv, slots + 1, D) for each of some layers.

    As many slots as a window has are for the tokens before the selection's `base`, the last one is
    for padding. Nothing is selected: the target's own tokens are copied.
    """

    def __init__(
        self,
        layout: KVLayout,
        shape: RetrievalCacheSpec,
        layers: Sequence[int],
        device: torch.device,
    ):
        """Allocate the buffers of these layers, all of which have a window."""
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._window = layout.window.tokens if layout.window is not None else 0
        self._before = min(self._window, shape.context)  # slots before the base's
        self.slots = shape.windowed_slots(self._window)
        buffers = layout.windowed.shape(len(layers), self.slots + 1)
        self.kv = torch.zeros(buffers, dtype=layout.dtype, device=device)

    def __contains__(self, layer: int) -> bool:
        return layer in self._index

    def buffer(self, layer: int) -> Tensor:
        """Return a layer's buffer."""
        return self.kv[self._index[layer]]

    def slot(self, position: int, base: int) -> WindowedSlot:
        """Return the slot of a token."""
        first = max(0, self._before - base)
        return WindowedSlot(self._before + position - base, first, self.slots)

    def write(self, layer: int, k: Tensor, v: Tensor, start: int, base: int) -> None:
        """Store the KV of the tokens at `start`; k (T, Hkv, D) is rotated."""
        slot, _, slots = self.slot(start, base)
        write_tokens(token_slice(self.buffer(layer), 0, slots), k, v, slot)

    def attend(
        self, layer: int, q: Tensor, start: int, base: int, traffic: ByteCounters
    ) -> Partial:
        """Return the attention of the tokens at `start`; q (T, Hq, D) is rotated."""
        kv, (slot, first, _) = self.buffer(layer), self.slot(start, base)
        end = slot + len(q)
        return attend_slots(token_slice(kv, first, end), q, end - first, traffic, self._window)

    def move(self, layer: int, start: int, tokens: int, base: int, new_base: int) -> None:
        """Move tokens, from the one at `start` on, to their slots with another base."""
        kv = token_slice(self.buffer(layer), 0, self.slots)
        move_tokens(kv, self.slot(start, base).slot, self.slot(start, new_base).slot, tokens)

    def copy(self, layer: int, end: int, base: int, parts: Sequence[Tensor]) -> None:
        """Copy the target's tokens up to `end`, parts (2, Hkv, n, D).

        Those that no query sees are left out.
        """
        kv = self.buffer(layer)
        for part in reversed(parts):
            count = min(part.shape[2], self.slot(end, base).slot)
            slot = self.slot(end - count, base).slot
            own = token_slice(part, part.shape[2] - count, part.shape[2])
            token_slice(kv, slot, slot + count).copy_(own)
            end -= part.shape[2]
