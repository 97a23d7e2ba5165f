"""KV in host memory that belongs to no cache: that of a sequence whose caches another one needs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from offload.attention.head_major import token_slice
from offload.layout import KVLayout
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import HostReader, read_layer


class KVSource(Protocol):
    """What another cache's beginning is copied from."""

    def host_readers(self) -> Sequence[HostReader]:
        """Return a reader of each layer's KV in host memory."""
        ...


class HostCopy:
    """A copy of the KV of a cache's first tokens, in host memory that is not pinned."""

    def __init__(self, layout: KVLayout, length: int):
        """Start empty; `fill` copies the first `length` tokens."""
        self.layout, self.length = layout, length
        self._layers: list[Tensor] = []  # (2, Hkv, T, D) each

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that are allocated so far."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def is_complete(self) -> bool:
        """Return whether all layers are copied."""
        return len(self._layers) == self.layout.layers

    def fill(self, cache: TieredCache) -> Generator[int, None, None]:
        """Copy the KV of the cache, and yield each layer's index once it is copied.

        Until then the cache must not change. Raises InsufficientMemoryError.
        """
        for index, read in enumerate(cache.host_readers()):
            self._layers.append(read_layer(read, self.layout, self.length))
            yield index

    def host_readers(self) -> list[HostReader]:
        """Return a reader of each layer's KV, once all are copied."""
        return [partial(_read, layer) for layer in self._layers]

    def free(self) -> None:
        """Free the memory."""
        self._layers.clear()


def _read(layer: Tensor, head: int, start: int, end: int) -> Tensor:
    return token_slice(layer[:, head], start, end)
