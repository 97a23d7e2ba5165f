"""The target's cache: some layers resident on the device, the KV of the others in host memory,
streamed to verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from offload.attention import partial_attention
from offload.attention.folding import Partial, merge
from offload.cache import Cache, Follower, put
from offload.errors import FitError
from offload.layout import KVLayout
from offload.link import Link
from offload.memory_plan import places, tail_tokens
from offload.ring import TransferRing
from offload.rotary import Rotary
from offload.store import HostArena, HostStore

LAST_ROWS = 32  # rows of the prompt that followers see: a prefill attends with these in every layer


class TieredCache(Cache):
    """Exact KV of the whole sequence over two tiers.

    `boundary` splits the tokens into a prefix and recent ones. A resident layer is one device
    buffer. Any other layer has its prefix in the host store and the recent tokens in a device tail.
    A pass streams the prefix through the ring, a group of heads at a time: a head needs only its
    own KV, so groups are independent and only prefix and tail are merged. The boundary moves in
    whole blocks, once `recent` tokens stand behind the next one; the tokens it passes are written
    to the host.
    """

    _state = ("length", "boundary", "_tail")

    def __init__(
        self,
        layout: KVLayout,
        capacity: int,
        resident_layers: int,
        link: Link,
        rotary: Rotary,
        arena: HostArena,
        recent: int = 0,
        block: int = 256,
        rows: int = 256,
        slot_heads: int = 1,
        slots: int = 3,
        late_layers: int = 0,
    ):
        """`capacity`: tokens of the whole text; `rows`: tokens of the largest pass when decoding.
        `late_layers`: of the resident ones, those that prefill writes to the host, and that come to
        the device behind it.
        """
        super().__init__(layout)
        if late_layers and not (link.copies and late_layers <= resident_layers < layout.layers):
            raise ValueError(
                f"{late_layers} of {resident_layers} layers come late: that takes far layers, and a"
                " link"
            )
        self.capacity, self.link, self.rotary = capacity, link, rotary
        self._places = places(layout.layers, resident_layers)
        self.recent, self.block = recent, block
        self.followers: list[Follower] = []
        self.boundary = 0
        far = layout.layers - resident_layers
        self._resident = resident_layers
        self._near = [self._layer() for _ in range(resident_layers - late_layers)]
        self._tail = torch.empty(
            layout.shape(far, tail_tokens(recent, block, rows)),
            dtype=layout.dtype,
            device=link.device,
        )
        self._store = HostStore(layout, far + late_layers, capacity, arena)  # the late ones last
        self._slot_heads = slot_heads
        slot, room = (
            (2, slot_heads, capacity, layout.head_dim),
            torch.Size(layout.shape(1, capacity)).numel(),
        )
        self._ring = TransferRing(link, slots, slot, layout.dtype, room) if far else None
        self._prompt = 0  # tokens of the prompt while it is being prefilled
        # (2, Hkv, prompt, D): the one far layer that prefill works on, in the ring's memory
        self._stage: Tensor | None = None
        # tickets of the stage's blocks on their way to the host, by first token
        self._writes: dict[int, Any] = {}

    @property
    def device_bytes(self) -> int:
        return (
            sum(kv.nbytes for kv in self._near)
            + self._tail.nbytes
            + (self._ring.nbytes if self._ring else 0)
        )

    # -- decoding ----------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            raise ValueError(
                f"{self.length} tokens and {rows} more do not fit a cache of {self.capacity}"
            )
        self.bring_in()
        self._move_boundary()
        if self._ring is not None and self.boundary:
            self._ring.start(self._store.chunks(len(self._tail), self.boundary, self._slot_heads))
        for follower in self.followers:
            follower.follow(self.boundary, self.length, self.length + rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        q, k = self.rotary(q, start), self.rotary(k, start)
        if self._prompt:
            return self._attend_prompt(layer, q, self._keep(layer, k, v, start), start)
        end = start + len(q)
        near, index = self._places[layer]
        if near:
            kv = self._near[index]
            put(kv, k, v, start)
            self._show(layer, 0, q, kv[:, :, : self.boundary], kv[:, :, self.boundary : end])
            return self._attend(q, kv, end)[0]
        tail = self._tail[index]
        put(tail, k, v, start - self.boundary)
        parts = [self._attend(q, tail, end - self.boundary)]
        tail = tail[:, :, : end - self.boundary]
        if self.boundary:
            parts.append(self._attend_far(layer, q, tail))
        else:
            self._show(layer, 0, q, tail[:, :, :0], tail)
        return merge(parts)[0]

    def crop(self, length: int) -> None:
        self._tell_followers(min(self.length, length))  # one of them may refuse
        super().crop(length)
        # a tail that would start past the end is empty
        self.boundary = min(self.boundary, self.length)

    def advance(self, rows: int) -> None:
        super().advance(rows)
        self._tell_followers(self.length)

    def _tell_followers(self, length: int) -> None:
        for follower in self.followers:
            follower.advanced(length)

    def _show(self, layer: int, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
        for follower in self.followers:
            follower.observe(layer, head, q, prefix, recent)

    def _attend_far(self, layer: int, q: Tensor, tail: Tensor) -> Partial:
        """Attention of all rows over a far layer's prefix, one group of heads after another as they
        come over the link.
        """
        assert self._ring is not None
        group = q.shape[1] // self.layout.heads  # query heads per KV head
        parts = []
        for head in range(0, self.layout.heads, self._slot_heads):
            chunk = self._ring.next()  # (2, h, boundary, D), on the device until the next call
            rows = q[:, head * group : (head + chunk.shape[1]) * group]
            self.traffic.link_in += chunk.nbytes
            self.traffic.attended += chunk.nbytes
            parts.append(
                partial_attention(
                    rows, chunk[0].transpose(0, 1), chunk[1].transpose(0, 1), causal=False
                )
            )
            self._show(layer, head, rows, chunk, tail[:, head : head + chunk.shape[1]])
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

    def _boundary_at(self, length: int) -> int:
        return max(0, length - self.recent) // self.block * self.block

    def _move_boundary(self) -> None:
        """Move it as far as it may go, writing what it passes to the host, and the rest of the tail
        to the tail's front.
        """
        if (count := self._boundary_at(self.length) - self.boundary) <= 0:
            return
        tickets = [
            self._write(layer, tail[:, :, :count], self.boundary)
            for layer, tail in enumerate(self._tail)
        ]
        if tickets:
            self.link.wait(tickets[-1])  # copies keep order; the tail is about to be written again
            rest = self.length - self.boundary - count
            self._tail[:, :, :, :rest] = self._tail[:, :, :, count : count + rest].clone()
        self.boundary += count

    def _write(self, layer: int, kv: Tensor, at: int) -> Any:
        self.traffic.link_out += kv.nbytes
        return self._store.write(self.link, layer, kv, at)

    # -- prefill -----------------------------------------------------------------------------------

    @contextmanager
    def prefill(self, tokens: int) -> Iterator[None]:
        """Layer-major prefill: inside, `attend` or `keep` is called for all chunks of a layer
        before any of the next layer, and `attend` for the last one.

        A far layer's KV is built in one device buffer, and its prefix written to the host block by
        block as it is computed; nothing is read back. On leaving, the cache stands at `tokens`
        tokens; `bring_in` is to follow.
        """
        if self.length:
            raise ValueError(f"prefill starts an empty cache; this one holds {self.length} tokens")
        if tokens > self.capacity:
            raise ValueError(f"a prompt of {tokens} tokens does not fit a cache of {self.capacity}")
        self._prompt, self.boundary = tokens, self._boundary_at(tokens)
        for follower in self.followers:
            follower.follow(self.boundary, tokens, tokens)
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
        self.advance(tokens)

    def bring_in(self) -> None:
        """The late layers, into memory that prefill has left. Raises FitError where others have
        taken it meanwhile.
        """
        if not (missing := self._resident - len(self._near)):
            return
        for kv in self._store.kv[-missing:]:
            try:
                near = self._layer()
            except torch.OutOfMemoryError as error:
                raise FitError(
                    f"others took device memory meant for {missing} layers: use fewer "
                    "--resident-layers."
                ) from error
            heads = product(range(2), range(kv.shape[1]))
            self.link.copy(
                [
                    (near[part, head, : self.length], kv[part, head, : self.length])
                    for part, head in heads
                ]
            )
            self.traffic.link_in += kv[:, :, : self.length].nbytes
            self._near.append(near)
        self.link.drain()

    def _layer(self) -> Tensor:
        """Room for a resident layer (2, Hkv, capacity, D)."""
        with torch.inference_mode(False):  # a link writes to it from outside
            return torch.empty(
                self.layout.shape(1, self.capacity)[1:],
                dtype=self.layout.dtype,
                device=self.link.device,
            )

    def _place(self, layer: int) -> tuple[bool, int]:
        """In prefill: whether the layer is on the device, and its index there, or in the host
        store.
        """
        near, index = self._places[layer]
        late = index - len(self._near)
        return (False, len(self._tail) + late) if near and late >= 0 else (near, index)

    def keep(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """KV of prompt tokens that nothing is asked of but that later ones attend to them."""
        self._keep(layer, self.rotary(k, start), v, start)

    def _keep(self, layer: int, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Into the layer's buffer (2, Hkv, N, D), and from there to the host what goes there."""
        end, (near, index) = start + len(k), self._place(layer)
        whole = index >= len(self._tail)  # a late layer has no tail
        # of these tokens, those that go to the host
        kept = slice(start, end if whole else max(start, min(end, self.boundary)))
        if near:
            kv = self._near[index]
            put(kv, k, v, start)
        elif self._stage is None:  # host memory is device memory: the store is the layer's buffer
            kv = self._store.kv[index]
            put(kv, k, v, start)
            self.traffic.link_out += kv[:, :, kept].nbytes
        else:
            kv = self._stage
            if start in self._writes:  # the layer before still leaves from here
                self.link.wait(self._writes[start])
            put(kv, k, v, start)
            if kept.stop > start:
                self._writes[start] = self._write(index, kv[:, :, kept], start)
        return kv

    def _attend_prompt(self, layer: int, q: Tensor, kv: Tensor, start: int) -> Tensor:
        end, (near, index) = start + len(q), self._place(layer)
        out, _ = self._attend(q, kv, end)
        if end == self._prompt:
            recent = kv[:, :, self.boundary : end]
            if not near and index < len(self._tail):
                self._tail[index, :, :, : end - self.boundary] = recent
            self._show(layer, 0, q[-LAST_ROWS:], kv[:, :, : self.boundary], recent)
        return out
