"""The host store: the KV of the layers that do not fit on the device, head-major in one arena."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from offload.buffers import span
from offload.link import Copy, Link, by_head
from offload.traffic import Traffic


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

        Raises FitError when the host cannot give them.
        """
        if numel > self._buffer.numel():
            self.let_go()  # the old arena goes before the new one comes
            self._buffer = self.link.host_empty(numel, self.dtype)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return a view of this shape at the start of the arena.

        Whoever took one before has lost it, and its copies are over.
        """
        # copies of a pass given up would reach device memory that is someone else's by now
        self.link.drain()
        numel = prod(shape)
        self.reserve(numel)
        return self._buffer[:numel].view(shape)

    def let_go(self) -> None:
        """Free the arena's memory; its contents are lost."""
        self.link.release(self._buffer)
        self._buffer = torch.empty(0, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes


class HostLayer:
    """One layer's KV in host memory, `kv` (2, Hkv, capacity, D): a head's prefix is one copy.

    It may be slices of it (planes, Hkv, capacity, D), of a byte each.
    """

    def __init__(self, kv: Tensor, link: Link, traffic: Traffic):
        self.kv = kv
        self.link = link
        self._traffic = traffic

    def chunks(self, tokens: int, heads: int) -> Sequence[Tensor]:
        """Return views (2, heads, tokens, D) of the first tokens, for each group of heads."""
        return span(self.kv, 0, tokens).split(heads, dim=1)

    def write(self, kv: Tensor, at: int) -> Any:
        """Start writing kv (2, Hkv, T, D), contiguous per head, from slot `at` on.

        Returns the link's ticket.
        """
        return self.link.copy(self._written(kv, at))

    def fill(self, kv: Tensor, at: int) -> Any:
        """Start writing likewise, beside what comes to the device: for a prompt (`Link.send`)."""
        return self.link.send(self._written(kv, at))

    def _written(self, kv: Tensor, at: int) -> list[Copy]:
        self._traffic.link_out += kv.nbytes
        end = at + kv.shape[2]
        slots = span(self.kv, at, end)
        return by_head(slots, kv)

    def read(self, kv: Tensor) -> Any:
        """Start reading the first T tokens into kv (2, Hkv, T, D); returns the link's ticket."""
        self._traffic.link_in += kv.nbytes
        stored = span(self.kv, 0, kv.shape[2])
        return self.link.copy(by_head(kv, stored))
