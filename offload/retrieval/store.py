"""Where a retrieval cache keeps its tokens: all in the target's dtype, or selected ones in 8 bits.

Slots count what a pass attends to: the selected tokens, and behind them the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from offload.attention.head_major import token_slice
from offload.codec.int8 import dequantise, quantise
from offload.layout import KVLayout
from offload.retrieval.shape import QUANTISED_ELEMENTS, RetrievalCacheSpec


class RetrievalStore(ABC):
    """The memory of a retrieval cache: some layers, each of so many slots."""

    window_offset = 0  # the slot of the first token of a buffer that `own` returns

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
    def window(self, index: int) -> Tensor:
        """Return the buffer (2, Hkv, n, D) of a layer that tokens of the window are written to."""

    @abstractmethod
    def head_groups(self, index: int, first: int, end: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield heads of a layer, and their KV (2, h, n, D) in the slots from `first` to `end`.

        What is yielded is good until the next is asked for.
        """

    @abstractmethod
    def select(self, index: int, head: int, prefix: Tensor, chunks: Tensor) -> None:
        """Hold chunks (h, n) of prefix (2, h, N, D) in front of the window.

        The prefix is that of the heads from `head` on.
        """

    @abstractmethod
    def slot_bytes(self, first: int, end: int) -> int:
        """Return the bytes that a layer keeps in the slots from `first` to `end`."""


class FullPrecisionStore(RetrievalStore):
    """One buffer a layer: selected tokens, then the window."""

    def __init__(self, layout: KVLayout, shape: RetrievalCacheSpec, device: torch.device):
        self._layout = layout
        self._chunk = shape.chunk
        self.kv = torch.zeros(shape.kv_buffer(layout), dtype=layout.dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.kv]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def slots_of(self, selected: int) -> tuple[int, int]:
        return 0, selected

    def window(self, index: int) -> Tensor:
        return self.kv[index]

    def head_groups(self, index: int, first: int, end: int) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), token_slice(self.kv[index], first, end)

    def select(self, index: int, head: int, prefix: Tensor, chunks: Tensor) -> None:
        heads = slice(head, head + len(chunks))
        selected = token_slice(self.kv[index, :, heads], 0, chunks.shape[1] * self._chunk)
        copy_chunks(selected, prefix, self._chunk, chunks)

    def slot_bytes(self, first: int, end: int) -> int:
        return self._layout.bytes(end - first, 1)


class Int8Store(RetrievalStore):
    """Selected tokens in 8 bits, the window in the target's dtype.

    For a pass both are written to one buffer, a few heads at a time. All layers share it. The
    selected ones end where the window begins, which is the same slot always.
    """

    def __init__(self, layout: KVLayout, shape: RetrievalCacheSpec, device: torch.device):
        self._layout = layout
        self._shape = shape
        self.window_offset = shape.selected_slots
        codes = layout.shape(layout.layers, shape.selected_slots)
        window = layout.shape(layout.layers, shape.slots - shape.selected_slots)
        self._heads = shape.shared_heads(layout)
        some_heads = replace(layout, heads=self._heads)
        _, *shared = some_heads.shape(1, shape.slots)
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
        return self.window_offset - selected, self.window_offset

    def window(self, index: int) -> Tensor:
        return self._window[index]

    def head_groups(self, index: int, first: int, end: int) -> Iterator[tuple[slice, Tensor]]:
        window = self.window_offset
        for head in range(0, self._layout.heads, self._heads):
            heads = slice(head, head + self._heads)
            codes = token_slice(self._codes[index, :, heads], first, window)
            scales = token_slice(self._scales[index, :, heads], first, window)
            recent = self._window[index, :, heads]
            shared = self._shared[:, : recent.shape[1]]
            dequantise(codes, scales, token_slice(shared, first, window))
            token_slice(shared, window, end).copy_(token_slice(recent, 0, end - window))
            yield heads, token_slice(shared, first, end)

    def select(self, index: int, head: int, prefix: Tensor, chunks: Tensor) -> None:
        chunk = self._shape.chunk
        end = self.window_offset
        start = end - chunks.shape[1] * chunk
        for first in range(0, len(chunks), self._heads):
            part = slice(first, first + self._heads)
            few = chunks[part]
            heads = slice(head + first, head + first + len(few))
            selected = token_slice(self._shared[:, : len(few)], start, end)
            copy_chunks(selected, prefix[:, part], chunk, few)
            codes = token_slice(self._codes[index, :, heads], start, end)
            self._quantise(selected, codes, token_slice(self._scales[index, :, heads], start, end))

    def _quantise(self, selected: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantise selected tokens (2, h, n, D), few at a time, for it takes float32 of each."""
        heads, tokens, dim = selected.shape[1:]
        step = max(1, QUANTISED_ELEMENTS // (2 * heads * dim))
        for at in range(0, tokens, step):
            quantise(*(token_slice(each, at, at + step) for each in (selected, codes, scales)))

    def slot_bytes(self, first: int, end: int) -> int:
        window = self.window_offset
        return self._shape.quantised_bytes(self._layout, window - first, end - window)


def copy_chunks(selected: Tensor, prefix: Tensor, chunk: int, chunks: Tensor) -> None:
    """Copy chunks (h, n) of prefix (2, h, N, D) to selected (2, h, n * chunk, D)."""
    row = chunk * prefix.shape[3]  # a chunk of one head is one row to copy
    for part, head in product(range(2), range(len(chunks))):
        source = prefix[part, head].view(-1, row)
        torch.index_select(source, 0, chunks[head], out=selected[part, head].view(-1, row))


def make_store(layout: KVLayout, shape: RetrievalCacheSpec, device: torch.device) -> RetrievalStore:
    """Allocate the store that a shape asks for, of a layout's layers."""
    kind = Int8Store if shape.quantised else FullPrecisionStore
    return kind(layout, shape, device)
