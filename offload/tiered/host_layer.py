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

    For split layers it is byte planes (planes, Hkv, capacity, D).
    """

    def __init__(self, kv: Tensor, link: Link, traffic: ByteCounters):
        self.kv = kv
        self.link = link
        self._traffic = traffic

    def chunks(self, tokens: int, heads: int) -> Sequence[Tensor]:
        """Return views (2, heads, tokens, D) of the first tokens, for each group of heads."""
        return token_slice(self.kv, 0, tokens).split(heads, dim=1)

    def write(self, kv: Tensor, at: int) -> Any:
        """Start writing kv (2, Hkv, T, D), contiguous per head, to the slots from `at` on.

        Returns the link's ticket.
        """
        return self.link.copy(self._copies_to_host(kv, at))

    def store_async(self, kv: Tensor, at: int) -> Any:
        """Start writing a prompt's KV as `write` does, beside copies in (`Link.copy_out`)."""
        return self.link.copy_out(self._copies_to_host(kv, at))

    def _copies_to_host(self, kv: Tensor, at: int) -> list[Copy]:
        self._traffic.link_out += kv.nbytes
        return copies_by_head(token_slice(self.kv, at, at + kv.shape[2]), kv)

    def read(self, kv: Tensor) -> Any:
        """Start reading the first T tokens into kv (2, Hkv, T, D); return the link's ticket."""
        self._traffic.link_in += kv.nbytes
        return self.link.copy(copies_by_head(kv, token_slice(self.kv, 0, kv.shape[2])))
