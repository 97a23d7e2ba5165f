"""A host buffer that is reused by request after request."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from offload.memory.link import Link


class HostArena:
    """A flat host buffer that is reused by request after request.

    It is allocated (and pinned) at the largest size requested so far.
    """

    def __init__(self, link: Link, dtype: torch.dtype):
        self.link = link
        self.dtype = dtype
        self._buffer = torch.empty(0, dtype=dtype)

    def reserve(self, numel: int) -> None:
        """Grow the arena to `numel` elements if it is smaller; growing loses its contents.

        Raises InsufficientMemoryError if host memory does not suffice.
        """
        if numel > self._buffer.numel():
            self.free()  # before allocating the larger one
            self._buffer = self.link.host_empty(numel, self.dtype)

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return a view of this shape at the start of the arena.

        It invalidates earlier views, after waiting for their copies.
        """
        # copies of a cancelled forward would overwrite device memory that is reused by now
        self.link.drain()
        numel = prod(shape)
        self.reserve(numel)
        return self._buffer[:numel].view(shape)

    def free(self) -> None:
        """Free the arena's memory; its contents are lost."""
        self.link.release(self._buffer)
        self._buffer = torch.empty(0, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes
