"""The middle level's cache: the part of the target's KV that matters, on the device.

The paper selects chunks once, after the prompt (TriForce, arXiv 2404.11912, section 4.1). But a
verification streams all keys to the device anyway: here the selection is updated as the sequence
grows (docs/algorithm.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.attention.folding import Partial
from offload.attention.head_major import attend_by_heads, token_slice, write_tokens
from offload.cache.static_shape import SlotBuffers, StaticCache, WindowedSlot
from offload.layout import KVLayout
from offload.retrieval.selection import SelectionPolicy, Selector
from offload.retrieval.shape import RetrievalCacheSpec
from offload.retrieval.store import make_store
from offload.retrieval.windows import RetrievalWindows
from offload.rotary import Rotary
from offload.traffic import ByteCounters


class RetrievalCache(StaticCache):
    """An observer of a TieredCache, with its own token slots in each layer.

    They hold the selected tokens, then the window and the draft, so that a forward attends to one
    contiguous segment. Keys are rotated at their absolute positions. The memory is a
    `RetrievalStore`. In a layer with a window of its own nothing is selected: it keeps that many
    tokens before the window, instead.
    """

    _state: ClassVar[tuple[str, ...]] = ("length", "selector")

    def __init__(
        self,
        layout: KVLayout,
        shape: RetrievalCacheSpec,
        policy: SelectionPolicy,
        rotary: Rotary,
        device: torch.device,
        min_interval: int = 1,
        layers: Sequence[int] | None = None,
    ):
        """Allocate the buffers.

        Args:
            layout: the target's, on this rank.
            shape: how the budget is spent.
            policy: which chunks are selected, and whether later verifications select again.
            rotary: the target's tables.
            device: where the cache is allocated.
            min_interval: as in `Selector`.
            layers: layers of the target that have a buffer; by default all with attention.
        """
        super().__init__(layout)
        if layers is None:
            layers = layout.attention_layers
        windowed = [layer for layer in layers if layout.window_of(layer) is not None]
        full = [layer for layer in layers if layer not in windowed]
        self._index = {layer: index for index, layer in enumerate(full)}  # layer -> buffer
        self._windows = RetrievalWindows(layout, shape, windowed, device)
        self.slots = shape.slots
        self._store = make_store(layout.with_full_attention(len(full)), shape, device)
        self.window_offset = self._store.window_offset
        self.reset(shape, policy, rotary, min_interval)

    @torch.inference_mode()
    def reset(
        self, shape: RetrievalCacheSpec, policy: SelectionPolicy, rotary: Rotary, min_interval: int
    ) -> None:
        """Begin another sequence, whose spec must have the same buffers.

        Slots that are not visible are read by static forwards: what was not finite may not stay.
        """
        self.follow(0)
        self.traffic = ByteCounters()
        self.shape = shape
        self.selector = Selector(policy, shape, min_interval)
        self.rotary = rotary
        for tensor in self.state_tensors:
            tensor.zero_()
        if self.recurrent is not None:
            self.recurrent.reset()

    @property
    def device_bytes(self) -> int:
        states = self.recurrent.nbytes if self.recurrent is not None else 0
        return self._store.nbytes + self._windows.kv.nbytes + states

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        k = self.rotary.keys(k, start, layer)
        q = self.rotary.queries(q, start, layer)
        if layer in self._windows:
            args = layer, q, k, v, start, self.selector.base, self.traffic
            return self._windows.attend(*args)
        _write(self, self._store.window(self._index[layer]), slice(None), k, v, start)
        first = self.first_valid_slot()
        slot, _ = self.slot_and_position(start)
        end = slot + len(q)
        self.traffic.attended += self._store.slot_bytes(first, end)
        groups = self._store.head_groups(self._index[layer], first, end)
        return attend_by_heads(q, k.shape[1], groups, partial(partial_attention, causal=True))

    def slot_and_position(self, start: int) -> tuple[int, int]:
        base = self.selector.base
        if start < base:
            raise ValueError(
                f"token {start} has no slot of its own: the selection covers the first {base}"
            )
        _, window = self._store.slots_of(self.selector.selected)
        return window + start - base, start

    def windowed_slot(self, start: int) -> WindowedSlot:
        return self._windows.slot(start, self.selector.base)

    def buffers(self, layer: int) -> SlotBuffers:
        if layer in self._windows:
            return SlotBuffers(self._windows.buffer(layer))
        index = self._index[layer]
        return SlotBuffers(self._store.window(index), None, *self._store.codes(index))

    def first_valid_slot(self) -> int:
        first, _ = self._store.slots_of(self.selector.selected)
        return first

    def slot_bytes(self, first: int, end: int) -> int:
        return len(self._index) * self._store.slot_bytes(first, end) + self._windows.kv.nbytes

    def head_groups(self, layer: int) -> Iterator[tuple[slice, Tensor]]:
        if layer in self._windows:
            kv = token_slice(self._windows.buffer(layer), 0, self._windows.slots)
            return iter([(slice(None), kv)])
        return self._store.head_groups(self._index[layer], 0, self.slots)

    @property
    def state_tensors(self) -> list[Tensor]:
        return [*self._store.tensors, self._windows.kv]

    def crop(self, length: int) -> None:
        self.selector.check_crop(length)
        super().crop(length)

    # -- observing the target ----------------------------------------------------------------------

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        self.selector.begin(boundary, length, end)
        self._windows.end = end

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        selector = self.selector
        if layer in self._windows:
            own = token_slice(recent, recent.shape[2] - len(q), recent.shape[2])
            parts = [prefix, recent] if selector.is_selecting else [own]
            self._windows.copy(layer, selector.base, parts)
        if layer not in self._index:
            return
        count, tokens = prefix.shape[1:3]
        window, start = recent, selector.base
        if not selector.is_selecting:
            # the target's exact KV replaces the KV that this level computed from a partial context
            offset = recent.shape[2] - len(q)
            window, start = token_slice(recent, offset, recent.shape[2]), tokens + offset
        k, v = window.transpose(1, 2)
        kv = self._store.window(self._index[layer])
        _write(self, kv, slice(head, head + count), k, v, start)
        if not selector.is_selecting:
            return
        for first, part, chunks in selector.select_by_parts(layer, head, q, prefix, recent[0]):
            self._store.select(self._index[layer], first, part, chunks)

    def on_advance(self, length: int) -> None:
        if length == 0:
            self.selector.reset()
        self.selector.check_crop(length)
        self.follow(length)


def _write(
    cache: RetrievalCache, kv: Tensor, heads: slice, k: Tensor, v: Tensor, start: int
) -> None:
    """Write k and v (T, h, D) of these heads to a layer's buffer, as the tokens from `start` on.

    Raises ValueError if they do not fit.
    """
    slot, _ = cache.slot_and_position(start)
    window = token_slice(kv, 0, cache.slots - cache.window_offset)
    write_tokens(window[:, heads], k, v, slot - cache.window_offset)
