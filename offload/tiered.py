"""The target's cache: the first layers resident on the device, the KV of the others in host memory, streamed to verify."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.attention import Partial, merge, partial_attention
from offload.cache import Cache, Follower, put
from offload.layout import KVLayout
from offload.link import Link
from offload.ring import TransferRing
from offload.rotary import Rotary
from offload.store import HostArena, HostStore


class TieredCache(Cache):
    """Exact KV of the whole sequence over two tiers.

    A resident layer is one device buffer. Any other layer is a prefix in the host store, of `flushed` tokens, and a device tail
    with the tokens since. A pass streams the prefix through the ring, a group of heads at a time: a head needs only its own KV,
    so groups are independent and only prefix and tail are merged. The tail goes to the host in one block when it is full.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity: int,
        resident_layers: int,
        link: Link,
        rotary: Rotary,
        arena: HostArena,
        tail: int = 256,
        slot_heads: int = 1,
        slots: int = 3,
    ):
        super().__init__(layout)
        self.capacity, self.resident_layers, self.link, self.rotary = capacity, resident_layers, link, rotary
        self.followers: list[Follower] = []
        self.flushed = 0
        far = layout.layers - resident_layers
        self._near = torch.empty(layout.shape(resident_layers, capacity), dtype=layout.dtype, device=link.device)
        self._tail = torch.empty(layout.shape(far, tail), dtype=layout.dtype, device=link.device)
        self._tail_capacity = tail
        self._store = HostStore(layout, far, capacity, arena)
        self._slot_heads = slot_heads
        slot, room = (2, slot_heads, capacity, layout.head_dim), torch.Size(layout.shape(1, capacity)).numel()
        self._ring = TransferRing(link, slots, slot, layout.dtype, room) if far else None
        self._prompt = 0  # tokens of the prompt while it is being prefilled
        self._stage: Tensor | None = None  # (2, Hkv, prompt, D): the one far layer that prefill works on, in the ring's memory
        self._writes: dict[int, Any] = {}  # tickets of the stage's blocks on their way to the host, by first token

    @property
    def device_bytes(self) -> int:
        return self._near.nbytes + self._tail.nbytes + (self._ring.nbytes if self._ring else 0)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            raise ValueError(f"{self.length} tokens and {rows} more do not fit a cache of {self.capacity}")
        if self._ring is None:
            return
        if self.length + rows - self.flushed > self._tail_capacity:
            self._flush()
        if self.flushed:
            self._ring.start(self._store.chunks(self.flushed, self._slot_heads))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        q, k = self.rotary(q, start), self.rotary(k, start)
        if self._prompt:
            return self._attend_prompt(layer, q, k, v, start)
        for follower in self.followers:
            follower.written(layer, k, v, start)
        if layer < self.resident_layers:
            put(self._near[layer], k, v, start)
            return self._attend(q, self._near[layer], start + len(q))[0]
        tail, at = self._tail[layer - self.resident_layers], start - self.flushed
        put(tail, k, v, at)
        recent = self._attend(q, tail, at + len(q))
        return merge([self._attend_far(q), recent])[0] if self.flushed else recent[0]

    def crop(self, length: int) -> None:
        super().crop(length)
        self.flushed = min(self.flushed, self.length)  # a tail that would start past the end is empty
        self._tell_followers()

    def advance(self, rows: int) -> None:
        super().advance(rows)
        self._tell_followers()

    def _tell_followers(self) -> None:
        for follower in self.followers:
            follower.advanced(self.length)

    def _attend_far(self, q: Tensor) -> Partial:
        """Attention of all rows over a far layer's prefix, one group of heads after another as they come over the link."""
        assert self._ring is not None
        group = self._slot_heads * (q.shape[1] // self.layout.heads)  # query heads a chunk serves
        parts = []
        for heads in q.split(group, dim=1):
            chunk = self._ring.next()  # (2, heads, flushed, D)
            self.traffic.link_in += chunk.nbytes
            self.traffic.attended += chunk.nbytes
            parts.append(partial_attention(heads, chunk[0].transpose(0, 1), chunk[1].transpose(0, 1), causal=False))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

    def _flush(self) -> None:
        """Write the tail, all of which is verified, to the host in one block."""
        count = self.length - self.flushed
        tickets = [self._write(layer, tail[:, :, :count], self.flushed) for layer, tail in enumerate(self._tail)]
        self.link.wait(tickets[-1])  # copies keep order; the tail is about to be written again
        self.flushed = self.length

    def _write(self, layer: int, kv: Tensor, at: int) -> Any:
        self.traffic.link_out += kv.nbytes
        return self._store.write(self.link, layer, kv, at)

    # -- prefill ------------------------------------------------------------------------------------------------------

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Layer-major prefill: inside, `attend` is called for all chunks of a layer before any of the next layer.

        A far layer's KV is built in one device buffer, and written to the host block by block as it is computed; nothing is read
        back. On leaving, the cache stands at `tokens` tokens.
        """
        if self.length:
            raise ValueError(f"prefill starts an empty cache; this one holds {self.length} tokens")
        if tokens > self.capacity:
            raise ValueError(f"a prompt of {tokens} tokens does not fit a cache of {self.capacity}")
        self._prompt = tokens
        if self._ring is not None and self.link.copies:
            self.link.drain()  # a pass given up may still fill the slots, which are the stage now
            shape = self.layout.shape(1, tokens)[1:]
            self._stage = self._ring.memory[: torch.Size(shape).numel()].view(shape)
        try:
            yield
            self.link.drain()
        finally:
            self._prompt, self._stage = 0, None
            self._writes.clear()
        self.flushed = tokens if self._ring is not None else 0
        self.advance(tokens)

    def _attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        end = start + len(q)
        if layer < self.resident_layers:
            kv = self._near[layer]
            put(kv, k, v, start)
        elif self._stage is None:  # host memory is device memory: the store is the layer's buffer
            kv = self._store.kv[layer - self.resident_layers]
            put(kv, k, v, start)
            self.traffic.link_out += k.nbytes + v.nbytes
        else:
            kv = self._stage
            if start in self._writes:  # the layer before still leaves from here
                self.link.wait(self._writes[start])
            put(kv, k, v, start)
            self._writes[start] = self._write(layer - self.resident_layers, kv[:, :, start:end], start)
        out, _ = self._attend(q, kv, end)
        if end == self._prompt:
            for follower in self.followers:
                follower.prefilled(layer, q, kv[0, :, :end].transpose(0, 1), kv[1, :, :end].transpose(0, 1))
        return out
