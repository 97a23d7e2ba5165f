"""Selected keys of split layers: those that matter most are exact where drafts attend to them.

Source: more bits for important tokens than for others are MiKV's idea (Yang et al. 2024, arXiv
2402.18096, section 3). There they are chosen once, for the output, and stored twice; here by every
verification, for drafts alone, and what is stored are the bits that high bytes lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from offload.codec.format import split_format
from offload.codec.selected_keys import SelectedKeys, gather_chunks, pack
from offload.kernels.selection import retrieval_kernels
from offload.layout import KVLayout
from offload.retrieval.selection import SelectionPolicy, Selector
from offload.retrieval.shape import SplitSelectionSpec


class SplitSelection:
    """An observer of a TieredCache that keeps the low bits of some keys of its split layers."""

    def __init__(
        self,
        layout: KVLayout,
        spec: SplitSelectionSpec,
        policy: SelectionPolicy,
        layers: Sequence[int],
        device: torch.device,
        min_interval: int = 1,
    ):
        """Allocate the memory of split layers.

        Args:
            layout: the target's, on this rank, in 16 bits.
            spec: how many tokens.
            policy: which chunks are selected, and whether later verifications select again.
            layers: the target's split layers.
            device: where the memory is allocated.
            min_interval: as in `Selector`.
        """
        fmt = split_format(layout.dtype)
        assert fmt is not None
        self._format, self._chunk = fmt, spec.chunk
        self._index = {layer: index for index, layer in enumerate(layers)}
        selected, chunks = spec.chunks
        sizes, width = (len(layers), layout.heads), fmt.low_key_bytes(layout.head_dim)
        self._lows = torch.zeros(
            *sizes, selected * spec.chunk, width, dtype=torch.uint8, device=device
        )
        self._chunks = torch.zeros(*sizes, selected, dtype=torch.int64, device=device)
        self._places = torch.zeros(*sizes, chunks, dtype=torch.int32, device=device)
        self._counts = [0] * len(layers)  # selected chunks of each layer
        self._kernels, _ = retrieval_kernels(
            device.type, layout.dtype, layout.head_dim, layout.groups
        )
        self.selector = Selector(policy, spec.selector, min_interval)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that change during decoding."""
        return [self._lows, self._chunks, self._places]

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that this has allocated."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def selected_keys(self, layer: int) -> SelectedKeys | None:
        """Return the keys of a split layer that were selected last; None if there are none."""
        index = self._index[layer]
        chunks = self._counts[index]
        if not chunks:
            return None
        return SelectedKeys(
            self._format,
            self._lows[index, :, : chunks * self._chunk],
            self._chunks[index, :, :chunks],
            self._places[index],
            self._chunk,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the state that `restore` returns to."""
        tensors = [tensor.clone() for tensor in self.tensors]
        state = {"selector": self.selector, "counts": self._counts}
        return {**deepcopy(state), "tensors": tensors}

    @torch.inference_mode()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot."""
        self.selector = deepcopy(snapshot["selector"])
        self._counts = list(snapshot["counts"])
        for tensor, saved in zip(self.tensors, snapshot["tensors"], strict=True):
            tensor.copy_(saved)

    # -- observing the target ----------------------------------------------------------------------

    def on_forward(self, boundary: int, length: int, end: int) -> None:
        self.selector.begin(boundary, length, end, recent=0)

    def on_attention(
        self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor
    ) -> None:
        if (index := self._index.get(layer)) is None or not self.selector.is_selecting:
            return
        for first, part, chunks in self.selector.select_by_parts(layer, head, q, prefix, recent[0]):
            self._store(index, first, part[0], chunks)

    def on_advance(self, length: int) -> None:
        if length == 0:
            self.selector.reset()
            self._counts = [0] * len(self._counts)
        self.selector.check_crop(length)

    def _store(self, index: int, head: int, keys: Tensor, chunks: Tensor) -> None:
        """Store chunks (h, n) of keys (h, N, D), those of a layer's heads from `head` on."""
        self._counts[index] = count = chunks.shape[1]
        heads = slice(head, head + len(chunks))
        lows = self._lows[index, heads, : count * self._chunk]
        if self._kernels is not None:
            self._kernels.store_lows(self._format, keys, chunks, self._chunk, lows)
        else:
            lows.copy_(pack(self._format, gather_chunks(keys, chunks, self._chunk)))
        self._chunks[index, heads, :count] = chunks
        places = self._places[index, heads].fill_(-1)
        order = torch.arange(count, dtype=places.dtype, device=places.device)
        places.scatter_(1, chunks, order.expand(len(chunks), -1))
