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
from offload.attention.head_major import (
    attend_by_heads,
    copy_tokens,
    move_tokens,
    token_slice,
    write_tokens,
)
from offload.cache.static_shape import SlotBuffers, StaticCache, WindowedSlot
from offload.cache.target_forward import TargetForward
from offload.layout import KVLayout
from offload.retrieval.selection import Placement, SelectionPolicy, Selector
from offload.retrieval.shape import RetrievalCacheSpec
from offload.retrieval.store import RetrievalStore, make_store
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
    target_forward: TargetForward

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
        self.target_forward = TargetForward(len(layout.attention_layers))
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
        self.target_forward.begin(0)
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
        q, k = self.rotary.queries_and_keys(q, k, start, layer)
        end = start + len(q)
        forward, placement = self.target_forward, self.selector.placement
        is_passed = forward.is_over or forward.has_passed(layer)
        if not is_passed and self.selector.previous is not None:
            placement = self.selector.previous
        exact = forward.exact(layer, start)
        forward.drafted_end = max(forward.drafted_end, end)
        if layer in self._windows:
            base = placement.base
            self._windows.write(layer, k[exact:], v[exact:], start + exact, base)
            return self._windows.attend(layer, q, start, base, self.traffic)
        first, slot = _slots(self._store, placement, start)
        window = _window(self, layer)
        write_tokens(window, k[exact:], v[exact:], slot + exact - self.window_offset)
        end = slot + len(q)
        self.traffic.attended += self._store.slot_bytes(first, end)
        groups = self._store.head_groups(self._index[layer], first, end)
        return attend_by_heads(q, k.shape[1], groups, partial(partial_attention, causal=True))

    def slot_and_position(self, start: int) -> tuple[int, int]:
        _, slot = _slots(self._store, self.selector.placement, start)
        return slot, start

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
        self.target_forward.begin(end)

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        forward, selector = self.target_forward, self.selector
        forward.complete_layer(layer)
        end, drafted = forward.end, forward.drafted
        placement, previous = selector.placement, selector.previous
        own = token_slice(recent, recent.shape[2] - len(q), recent.shape[2])
        if layer in self._windows:
            if previous is not None:
                self._windows.move(layer, end, drafted, previous.base, placement.base)
            parts = [prefix, recent] if selector.is_selecting else [own]
            self._windows.copy(layer, end, placement.base, parts)
        if layer not in self._index:
            return
        window = _window(self, layer)[:, head : head + prefix.shape[1]]
        if previous is not None:
            slots = (_slots(self._store, each, end)[1] for each in (previous, placement))
            before, after = (slot - self.window_offset for slot in slots)
            move_tokens(window, before, after, drafted)
        # the target's exact KV replaces the KV that this level computed from a partial context
        exact = recent if selector.is_selecting else own
        _, slot = _slots(self._store, placement, end - exact.shape[2])
        copy_tokens(window, exact, slot - self.window_offset)
        if not selector.is_selecting:
            return
        for first, part, chunks in selector.select_by_parts(layer, head, q, prefix, recent[0]):
            self._store.select(self._index[layer], first, part, chunks)

    def on_advance(self, length: int) -> None:
        if length == 0:
            self.selector.reset()
        self.selector.check_crop(length)
        self.follow(length, self.target_forward.end)


def _slots(store: RetrievalStore, placement: Placement, start: int) -> tuple[int, int]:
    """Return the first slot with a token, and that of the token at `start`.

    Raises ValueError if that has none.
    """
    base, selected = placement
    if start < base:
        raise ValueError(
            f"token {start} has no slot of its own: the selection covers the first {base}"
        )
    first, window = store.slots_of(selected)
    return first, window + start - base


def _window(cache: RetrievalCache, layer: int) -> Tensor:
    """Return the slots (2, Hkv, n, D) of a layer's window, without the one for padding."""
    kv = cache._store.window(cache._index[layer])
    return token_slice(kv, 0, cache.slots - cache.window_offset)
