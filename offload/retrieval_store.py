"""Where a retrieval cache keeps its tokens: all in the target's dtype, or selected ones in 8 bits.

Slots count what a pass attends to: the selected tokens, and behind them the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from offload.buffers import span
from offload.int8 import dequantise, quantise
from offload.layout import KVLayout
from offload.retrieval_shape import QUANTISED_ELEMENTS, RetrievalShape


class RetrievalStore(ABC):
    """The memory of a retrieval cache: some layers, each of so many slots."""

    first_own = 0  # the slot of the first token of a buffer that `own` returns

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What changes while tokens come."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are allocated."""

    @abstractmethod
    def slots_of(self, selected: int) -> tuple[int, int]:
        """Return the slots of the first selected token, of so many, and of the window's first."""

    @abstractmethod
    def own(self, index: int) -> Tensor:
        """Return the buffer (2, Hkv, n, D) of a layer that tokens of the window are written to."""

    @abstractmethod
    def attended(self, index: int, first: int, end: int) -> Tensor:
        """Return a layer's KV (2, Hkv, slots, D), right from slot `first` to `end`."""

    @abstractmethod
    def select(self, index: int, head: int, selected: Tensor) -> None:
        """Hold selected (2, h, n, D), of the heads from `head` on, in front of the window."""

    @abstractmethod
    def room(self, index: int, head: int, heads: int, selected: int) -> Tensor:
        """Return where selected tokens (2, h, n, D) may be gathered for `select`."""

    @abstractmethod
    def bytes_of(self, first: int, end: int) -> int:
        """Return the bytes that a layer keeps in the slots from `first` to `end`."""


class WholeStore(RetrievalStore):
    """One buffer a layer: selected tokens, then the window."""

    def __init__(self, layout: KVLayout, shape: RetrievalShape, device: torch.device):
        self._layout = layout
        self.kv = torch.zeros(shape.kv_buffer(layout), dtype=layout.dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.kv]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def slots_of(self, selected: int) -> tuple[int, int]:
        return 0, selected

    def own(self, index: int) -> Tensor:
        return self.kv[index]

    def attended(self, index: int, first: int, end: int) -> Tensor:
        return self.kv[index]

    def room(self, index: int, head: int, heads: int, selected: int) -> Tensor:
        return span(self.kv[index, :, head : head + heads], 0, selected)

    def select(self, index: int, head: int, selected: Tensor) -> None:
        heads, tokens = selected.shape[1:3]
        room = self.room(index, head, heads, tokens)
        if room.data_ptr() != selected.data_ptr():  # else they were gathered in place
            room.copy_(selected)

    def bytes_of(self, first: int, end: int) -> int:
        return self._layout.bytes(end - first, 1)


class Int8Store(RetrievalStore):
    """Selected tokens in 8 bits, the window in the target's dtype.

    For a pass both are written to one buffer, which all layers share. The selected ones end where
    the window begins, which is the same slot always.
    """

    def __init__(self, layout: KVLayout, shape: RetrievalShape, device: torch.device):
        self._layout = layout
        self._shape = shape
        self.first_own = shape.selected_slots
        codes = layout.shape(layout.layers, shape.selected_slots)
        window = layout.shape(layout.layers, shape.slots - shape.selected_slots)
        shared = layout.shape(1, shape.slots)[1:]
        self._codes = torch.zeros(codes, dtype=torch.int8, device=device)
        self._scales = torch.zeros(*codes[:-1], 1, dtype=layout.dtype, device=device)
        self._window = torch.zeros(window, dtype=layout.dtype, device=device)
        self._shared = torch.zeros(shared, dtype=layout.dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._codes, self._scales, self._window]

    @property
    def nbytes(self) -> int:
        return self._shared.nbytes + sum(each.nbytes for each in self.tensors)

    def slots_of(self, selected: int) -> tuple[int, int]:
        return self.first_own - selected, self.first_own

    def own(self, index: int) -> Tensor:
        return self._window[index]

    def attended(self, index: int, first: int, end: int) -> Tensor:
        window, shared = self.first_own, self._shared
        codes = span(self._codes[index], first, window)
        scales = span(self._scales[index], first, window)
        dequantise(codes, scales, span(shared, first, window))
        recent = span(self._window[index], 0, end - window)
        span(shared, window, end).copy_(recent)
        return shared

    def room(self, index: int, head: int, heads: int, selected: int) -> Tensor:
        return span(self._shared[:, head : head + heads], 0, selected)

    def select(self, index: int, head: int, selected: Tensor) -> None:
        heads, tokens, dim = selected.shape[1:]
        last = head + heads
        start = self.first_own - tokens
        codes = span(self._codes[index, :, head:last], start, self.first_own)
        scales = span(self._scales[index, :, head:last], start, self.first_own)
        # a few tokens at a time: quantising takes float32 for each element
        step = max(1, QUANTISED_ELEMENTS // (2 * heads * dim))
        for at in range(0, tokens, step):
            part = slice(at, at + step)
            quantise(selected[:, :, part], codes[:, :, part], scales[:, :, part])

    def bytes_of(self, first: int, end: int) -> int:
        selected = self.first_own - first
        return self._shape.quantised_bytes(self._layout, selected, end - self.first_own)


def make_store(layout: KVLayout, shape: RetrievalShape, device: torch.device) -> RetrievalStore:
    """Allocate the store that a shape asks for, of a layout's layers."""
    kind = Int8Store if shape.quantised else WholeStore
    return kind(layout, shape, device)
