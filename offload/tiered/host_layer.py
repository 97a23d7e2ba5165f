"""One layer's KV in host memory, head-major."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offload.attention.head_major import token_slice
from offload.memory.link import Copy, Link, copies_by_head
from offload.traffic import ByteCounters


class HostLayer:
    """One layer's KV in host memory, `kv` (2, Hkv, capacity, D): a head's prefix is one copy.

    It may be slices of it (planes, Hkv, capacity, D), of a byte each.
    """

    def __init__(self, kv: Tensor, link: Link, traffic: ByteCounters):
        self.kv = kv
        self.link = link
        self._traffic = traffic

    def chunks(self, tokens: int, heads: int) -> Sequence[Tensor]:
        """Return views (2, heads, tokens, D) of the first tokens, for each group of heads."""
        return token_slice(self.kv, 0, tokens).split(heads, dim=1)

    def write(self, kv: Tensor, at: int) -> Any:
        """Start writing kv (2, Hkv, T, D), contiguous per head, from slot `at` on.

        Returns the link's ticket.
        """
        return self.link.copy(self._written(kv, at))

    def store_async(self, kv: Tensor, at: int) -> Any:
        """Start writing likewise, beside what comes to the device: for a prompt (`Link.send`)."""
        return self.link.copy_out(self._written(kv, at))

    def _written(self, kv: Tensor, at: int) -> list[Copy]:
        self._traffic.link_out += kv.nbytes
        return copies_by_head(token_slice(self.kv, at, at + kv.shape[2]), kv)

    def read(self, kv: Tensor) -> Any:
        """Start reading the first T tokens into kv (2, Hkv, T, D); returns the link's ticket."""
        self._traffic.link_in += kv.nbytes
        return self.link.copy(copies_by_head(kv, token_slice(self.kv, 0, kv.shape[2])))
