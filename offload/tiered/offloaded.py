"""A layer of the target's cache whose prefix is in host memory and streamed from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.attention.head_major import in_pairs, token_slice, write_tokens
from offload.memory.link import Copy, Link
from offload.memory.transfer_ring import TransferRing
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import HostReader, KVBlock, copies_to
from offload.tiered.layer import KVGroup, TieredLayer
from offload.traffic import ByteCounters


class DeviceTail:
    """The tokens after a layer's boundary, in a device buffer `kv` (2, Hkv, capacity, D)."""

    def __init__(self, kv: Tensor):
        self.kv = kv

    def tokens(self, count: int) -> Tensor:
        """Return the first `count` tokens (2, Hkv, count, D), as a view."""
        return token_slice(self.kv, 0, count)

    def append(self, k: Tensor, v: Tensor, at: int) -> None:
        """Write k and v (T, Hkv, D) to the slots from `at` on."""
        write_tokens(self.kv, k, v, at)

    def shift(self, count: int, remaining: int) -> None:
        """Drop the first `count` tokens, and move the `remaining` after them to the start."""
        rest_kv = token_slice(self.kv, count, count + remaining).clone()
        self.tokens(remaining).copy_(rest_kv)

    def store(self, kv: Tensor, start: int, boundary: int) -> Tensor:
        """Store those tokens of kv (2, Hkv, T, D), from `start` on, that follow the boundary.

        Returns the tokens before the boundary (2, Hkv, n, D), as a view.
        """
        tokens = kv.shape[2]
        count = min(tokens, max(0, boundary - start))
        if count < tokens:
            at = start + count - boundary
            token_slice(self.kv, at, at + tokens - count).copy_(token_slice(kv, count, tokens))
        return token_slice(kv, 0, count)

    def load(self, kv: Tensor, length: int, boundary: int) -> None:
        """Copy the tokens from the boundary to `length` to their positions in kv (2, Hkv, N, D)."""
        token_slice(kv, boundary, length).copy_(self.tokens(length - boundary))

    def copy_to_host(self, count: int, link: Link) -> Tensor:
        """Return a copy of the first tokens (2, Hkv, count, D), unaffected by later writes."""
        return link.read_to_host(self.tokens(count)).clone()


class OffloadedLayer(TieredLayer):
    """A layer with its prefix in host memory, and the tokens after it in a device tail.

    A forward streams the prefix through the ring, a group of heads at a time. A head attends only
    to its own KV: groups are independent, and only prefix and tail are merged.
    """

    def __init__(
        self,
        host: HostLayer,
        tail: Tensor,
        ring: TransferRing,
        slot_heads: int,
        traffic: ByteCounters,
    ):
        """Keep the tail in `tail` (2, Hkv, capacity, D), a part of the cache's memory for tails."""
        self._host = host
        self._tail = DeviceTail(tail)
        self._ring = ring
        self._slot_heads = slot_heads
        self._traffic = traffic

    @property
    def device_bytes(self) -> int:
        return self._tail.kv.nbytes

    def chunks(self, boundary: int) -> Sequence[Tensor]:
        return self._host.chunks(boundary, self._slot_heads)

    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        self._tail.append(k, v, start - boundary)

    def groups(self, end: int, boundary: int) -> Iterator[KVGroup]:
        return self._groups(end, boundary, self._prefix)

    def _groups(
        self, end: int, boundary: int, prefix_of: Callable[[int, int], Tensor]
    ) -> Iterator[KVGroup]:
        """Yield groups of heads.

        prefix_of(head, boundary) returns the prefix (2, h, boundary, D) of the heads from `head`
        on, valid until the next call.
        """
        recent = in_pairs(self._tail.tokens(end - boundary))
        heads = recent.shape[1]
        if not boundary:
            yield KVGroup(0, heads, [recent])
            return
        for head in range(0, heads, self._slot_heads):
            prefix = in_pairs(prefix_of(head, boundary))
            tail = recent[:, head : head + prefix.shape[1]]
            yield KVGroup(head, heads, [prefix, tail], recent)

    def _prefix(self, head: int, boundary: int) -> Tensor:
        """Return the next heads' prefix (2, h, boundary, D) from the ring.

        It is valid until the next call.
        """
        chunk = self._ring.next_chunk()
        self._traffic.link_in += chunk.nbytes
        return chunk

    def offload_block(self, boundary: int, count: int) -> Any:
        return self._host.write(self._tail.tokens(count), boundary)

    def shift_tail(self, boundary: int, count: int, rest: int) -> None:
        self._tail.shift(count, rest)

    @property
    def buffer(self) -> Tensor | None:
        return None if self.is_split or self._host.link.copies else self._host.kv

    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        prefix = self._tail.store(kv, start, boundary)
        if not prefix.shape[2]:
            return None
        if self.buffer is not None:  # the prefix was built in place
            self._traffic.link_out += prefix.nbytes
            return None
        return self._host.store_async(prefix, start)

    def load(self, kv: Tensor, length: int, boundary: int) -> Any:
        self._tail.load(kv, length, boundary)
        if self.buffer is not None:  # kv already holds the prefix
            return None
        return self._host.read(token_slice(kv, 0, boundary))

    def load_block(self, block: KVBlock, boundary: int) -> list[Copy]:
        tokens = block.kv.shape[1]
        count = min(tokens, max(0, boundary - block.start))
        prefix = KVBlock(block.head, block.start, token_slice(block.kv, 0, count))
        for destination, source in copies_to(self._host.kv, prefix):
            destination.copy_(source)
        if count == tokens:
            return []
        first = block.start + count - boundary
        return copies_to(
            self._tail.kv, KVBlock(block.head, first, token_slice(block.kv, count, tokens))
        )

    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        recent = self._tail.copy_to_host(length - boundary, link)
        prefix = token_slice(self._host.kv, 0, boundary)

        def read(head: int, start: int, end: int) -> Tensor:
            stored = token_slice(prefix[:, head], start, end)
            if end <= boundary:
                return stored
            tail = token_slice(recent[:, head], max(0, start - boundary), end - boundary)
            return torch.cat((stored, tail), dim=1)

        return HostReader(read)
