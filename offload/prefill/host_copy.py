"""KV in host memory that belongs to no cache: that of a sequence whose caches another one needs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from offload.layout import KVLayout, Segment
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import HostReader, read_layer, read_segments


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
        self._layers: list[list[tuple[Segment, Tensor]]] = []  # (2, Hkv, T, D) each

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that are allocated so far."""
        return sum(kv.nbytes for layer in self._layers for _, kv in layer)

    @property
    def is_complete(self) -> bool:
        """Return whether all layers are copied."""
        return len(self._layers) == self.layout.layers

    def fill(self, cache: TieredCache) -> Generator[int, None, None]:
        """Copy the KV of the cache, and yield each layer's index once it is copied.

        Until then the cache must not change. Raises InsufficientMemoryError.
        """
        for index, read in enumerate(cache.host_readers()):
            segments = self._segments(index, read.segments)
            copies = (read_layer(read, self.layout.of(index), each) for each in segments)
            self._layers.append(list(zip(segments, copies, strict=True)))
            yield index

    def host_readers(self) -> list[HostReader]:
        """Return a reader of each layer's KV, once all are copied."""
        return [
            HostReader(
                partial(read_segments, layer),
                [each for each, _ in layer] if self._has_parts(index) else (),
            )
            for index, layer in enumerate(self._layers)
        ]

    def copyable(self, length: int) -> int:
        """Return how many of its first tokens can be copied, up to `length`."""
        window, states = self.layout.window, self.layout.recurrent
        if states is not None:
            held = self._layers[min(states.layers)] if self.is_complete else []
            ends = (segment.end for segment, _ in held if segment.end <= length)
            length = max(ends, default=0)
        if window is None:
            return length
        layer = self._layers[min(window.layers)] if self.is_complete else []
        return window.resumable(length, [segment for segment, _ in layer])

    def _has_parts(self, layer: int) -> bool:
        """Return whether parts of a layer are held: the last tokens before some positions."""
        return self.layout.is_recurrent(layer) or self.layout.window_of(layer) is not None

    def _segments(self, layer: int, held: Sequence[Segment]) -> list[Segment]:
        """Return what to copy of a layer, which holds these parts if it does not hold all."""
        if not self._has_parts(layer):
            return [Segment(0, self.length)]
        if self.layout.is_recurrent(layer):
            return [each for each in held if each.end <= self.length]
        cut = [Segment(start, min(end, self.length)) for start, end in held]
        return [each for each in cut if each.start < each.end]

    def free(self) -> None:
        """Free the memory."""
        self._layers.clear()
