"""One host buffer for text after text."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from offload.memory.link import Link


class HostArena:
    """One flat host buffer for text after text.

    It is allocated (and pinned) at the largest size asked for so far.
    """

    def __init__(self, link: Link, dtype: torch.dtype):
        self.link = link
        self.dtype = dtype
        self._buffer = torch.empty(0, dtype=dtype)

    def reserve(self, numel: int) -> None:
        """Make room for `numel` elements; where the arena grows, its contents are lost.

        Raises InsufficientMemoryError when the host cannot give them.
        """
        if numel > self._buffer.numel():
            self.free()  # the old arena goes before the new one comes
            self._buffer = self.link.host_empty(numel, self.dtype)

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Return a view of this shape at the start of the arena.

        Whoever took one before has lost it, and its copies are over.
        """
        # copies of a pass given up would reach device memory that is someone else's by now
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
