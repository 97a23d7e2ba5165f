"""The memory of a retrieval cache: all in the target's dtype, or selected tokens in int8.

Slots are numbered as attention sees them: the selected tokens, then the window.
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
from offload.codec.selected_keys import gather_chunks
from offload.kernels.selection import retrieval_kernels
from offload.layout import KVLayout
from offload.retrieval.shape import OBSERVED_KEYS, QUANTISED_ELEMENTS, RetrievalCacheSpec


class RetrievalStore(ABC):
    """The memory of a retrieval cache: some layers, with an equal number of slots."""

    window_offset = 0  # the slot that the buffer returned by `window` begins with

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Tensors that change during decoding."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Allocated bytes."""

    @abstractmethod
    def slots_of(self, selected: int) -> tuple[int, int]:
        """Return the first slot of `selected` tokens, and that of the window."""

    @abstractmethod
    def window(self, index: int) -> Tensor:
        """Return a layer's buffer (2, Hkv, n, D), to which tokens of the window are written.

        Its last slot is for padding.
        """

    def codes(self, index: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return a layer's codes (2, Hkv, m, D) and scales (2, Hkv, m, 1); None without any."""
        return None, None

    @abstractmethod
    def head_groups(self, index: int, first: int, end: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield heads of a layer, and their KV (2, h, n, D) in the slots from `first` to `end`.

        The KV is valid until the next is yielded.
        """

    @abstractmethod
    def select(self, index: int, head: int, prefix: Tensor, chunks: Tensor) -> None:
        """Store chunks (h, n) of prefix (2, h, N, D) before the window.

        The prefix is that of the heads from `head` on.
        """

    @abstractmethod
    def slot_bytes(self, first: int, end: int) -> int:
        """Return a layer's bytes in the slots from `first` to `end`."""


class FullPrecisionStore(RetrievalStore):
    """One buffer per layer: selected tokens, then the window."""

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
        tokens = chunks.shape[1] * self._chunk
        step = max(1, OBSERVED_KEYS // max(1, tokens))  # a GPU copies what is selected twice
        for heads, part, part_chunks in _parts(head, chunks, step):
            selected = token_slice(self.kv[index, :, heads], 0, tokens)
            copy_chunks(selected, prefix[:, part], self._chunk, part_chunks)

    def slot_bytes(self, first: int, end: int) -> int:
        return self._layout.bytes(end - first, 1)


class Int8Store(RetrievalStore):
    """Selected tokens in int8, the window in the target's dtype.

    For attention, a few heads at a time are dequantised to one buffer, which all layers share, and
    followed by their window. Selected tokens end at the slot where the window begins, which is
    fixed.
    """

    def __init__(self, layout: KVLayout, shape: RetrievalCacheSpec, device: torch.device):
        self._layout = layout
        self._shape = shape
        self.window_offset = shape.selected_slots
        codes = layout.shape(layout.layers, shape.selected_slots)
        window = layout.shape(layout.layers, shape.slots + 1 - shape.selected_slots)
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
        return self._shared.nbytes + sum(tensor.nbytes for tensor in self.tensors)

    def slots_of(self, selected: int) -> tuple[int, int]:
        return self.window_offset - selected, self.window_offset

    def window(self, index: int) -> Tensor:
        return self._window[index]

    def codes(self, index: int) -> tuple[Tensor, Tensor]:
        return self._codes[index], self._scales[index]

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
        layout = self._layout
        kernels, _ = retrieval_kernels(
            prefix.device.type, prefix.dtype, layout.head_dim, layout.groups
        )
        step = self._heads if kernels is None else len(chunks)
        for heads, part, part_chunks in _parts(head, chunks, step):
            codes = token_slice(self._codes[index, :, heads], start, end)
            scales = token_slice(self._scales[index, :, heads], start, end)
            if kernels is not None:
                kernels.store_int8(prefix[:, part], part_chunks, chunk, codes, scales)
                continue
            selected = token_slice(self._shared[:, : len(part_chunks)], start, end)
            copy_chunks(selected, prefix[:, part], chunk, part_chunks)
            self._quantise(selected, codes, scales)

    def _quantise(self, selected: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantise selected tokens (2, h, n, D) in parts, which bounds float32 scratch memory."""
        heads, tokens, dim = selected.shape[1:]
        step = max(1, QUANTISED_ELEMENTS // (2 * heads * dim))
        for start in range(0, tokens, step):
            quantise(*(token_slice(x, start, start + step) for x in (selected, codes, scales)))

    def slot_bytes(self, first: int, end: int) -> int:
        window = self.window_offset
        return self._shape.quantised_bytes(self._layout, window - first, end - window)


def _parts(head: int, chunks: Tensor, step: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield `step` heads of a layer at a time, where they are among those given, and their chunks.

    `chunks` (h, n) are those of the heads from `head` on.
    """
    for first in range(0, len(chunks), step):
        part = slice(first, first + step)
        yield slice(head + first, head + first + len(chunks[part])), part, chunks[part]


def copy_chunks(selected: Tensor, prefix: Tensor, chunk: int, chunks: Tensor) -> None:
    """Copy chunks (h, n) of prefix (2, h, N, D) to selected (2, h, n * chunk, D)."""
    row = chunk * prefix.shape[3]  # elements of one chunk of one head
    if prefix.is_cuda:  # three launches, where one for each head and part would take longer
        selected.copy_(gather_chunks(prefix, chunks, chunk))
        return
    for part, head in product(range(2), range(len(chunks))):
        source = prefix[part, head].view(-1, row)
        torch.index_select(source, 0, chunks[head], out=selected[part, head].view(-1, row))


def make_store(layout: KVLayout, shape: RetrievalCacheSpec, device: torch.device) -> RetrievalStore:
    """Allocate the store of a spec, for a layout's layers."""
    store_class = Int8Store if shape.quantised else FullPrecisionStore
    return store_class(layout, shape, device)
