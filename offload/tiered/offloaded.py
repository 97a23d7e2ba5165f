"""A layer of the target's cache whose prefix is in host memory, and streamed from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.attention.folding import merge
from offload.attention.head_major import attend_to, put, span
from offload.kernels.batch_invariant_attention import steady_attention
from offload.memory.link import Copy, Link
from offload.memory.transfer_ring import TransferRing
from offload.tiered.host_layer import HostLayer
from offload.tiered.kv_file import Excerpt, Piece, copies_to
from offload.tiered.layer import Show, TieredLayer
from offload.traffic import Traffic


class StreamedLayer(TieredLayer):
    """A layer with its prefix in host memory, and its recent tokens in a device tail.

    A pass streams the prefix through the ring, a group of heads at a time. A head needs only its
    own KV: groups are independent, and only prefix and tail are merged.
    """

    def __init__(
        self,
        host: HostLayer,
        tail: Tensor,
        ring: TransferRing,
        slot_heads: int,
        traffic: Traffic,
    ):
        """`tail` (2, Hkv, capacity, D): a part of the cache's memory for recent tokens."""
        self._host = host
        self._tail = tail
        self._ring = ring
        self._slot_heads = slot_heads
        self._traffic = traffic

    @property
    def device_bytes(self) -> int:
        return self._tail.nbytes

    def chunks(self, boundary: int) -> Sequence[Tensor]:
        return self._host.chunks(boundary, self._slot_heads)

    def put(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        put(self._tail, k, v, start - boundary)

    def attend(self, q: Tensor, end: int, boundary: int, show: Show) -> Tensor:
        return self._attend_exactly(q, end, boundary, self._come, show)

    def _attend_exactly(
        self,
        q: Tensor,
        end: int,
        boundary: int,
        prefix: Callable[[int, int], Tensor],
        show: Show,
    ) -> Tensor:
        """Attend to the layer's own elements; the prefix as in `_attend`."""
        if not self.is_steady:
            return self._attend(q, end, boundary, prefix, show, self._traffic)
        recent = span(self._tail, 0, end - boundary)
        outs = []
        for rows, kv, near in self._by_heads(q, boundary, prefix, recent, show):
            outs.append(steady_attention(rows, [kv, near], self._traffic))
        return torch.cat(outs, dim=1)

    def _attend(
        self,
        q: Tensor,
        end: int,
        boundary: int,
        prefix: Callable[[int, int], Tensor],
        show: Show,
        traffic: Traffic,
    ) -> Tensor:
        """Attend to the tail, and to what `prefix` returns of a group of heads.

        prefix(head, boundary) (2, h, boundary, D), from `head` on, is good until the next call.
        """
        count = end - boundary
        recent = span(self._tail, 0, count)
        parts = [attend_to(self._tail, q, count, traffic)]
        by_heads = []
        for rows, kv, _ in self._by_heads(q, boundary, prefix, recent, show):
            if boundary:
                by_heads.append(attend_to(kv, rows, boundary, traffic, causal=False))
        if by_heads:
            outs, lses = zip(*by_heads, strict=True)
            parts.append((torch.cat(outs, dim=1), torch.cat(lses, dim=1)))
        return merge(parts)[0]

    def _by_heads(
        self,
        q: Tensor,
        boundary: int,
        prefix: Callable[[int, int], Tensor],
        recent: Tensor,
        show: Show,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield groups of heads, their queries, prefix and recent tokens, and show them."""
        if not boundary:
            nothing = span(recent, 0, 0)
            show(0, q, nothing, recent)
            yield q, nothing, recent
            return
        heads = recent.shape[1]
        group = q.shape[1] // heads  # query heads per KV head
        for head in range(0, heads, self._slot_heads):
            kv = prefix(head, boundary)
            last = head + kv.shape[1]
            rows = q[:, head * group : last * group]
            near = recent[:, head:last]
            yield rows, kv, near
            show(head, rows, kv, near)

    def _come(self, head: int, boundary: int) -> Tensor:
        """Return the prefix of the next heads, which has come over the link."""
        chunk = self._ring.next()
        self._traffic.link_in += chunk.nbytes
        return chunk

    def write_back(self, boundary: int, count: int) -> Any:
        return self._host.write(span(self._tail, 0, count), boundary)

    def drop(self, count: int, rest: int) -> None:
        kept = span(self._tail, count, count + rest).clone()
        span(self._tail, 0, rest).copy_(kept)

    @property
    def buffer(self) -> Tensor | None:
        return None if self._host.link.copies else self._host.kv

    def keep(self, kv: Tensor, start: int, boundary: int) -> Any:
        prefix = self._keep_recent(kv, start, boundary)
        if not prefix.shape[2]:
            return None
        if self.buffer is not None:  # the prefix was built where it belongs
            self._traffic.link_out += prefix.nbytes
            return None
        return self._host.fill(prefix, start)

    def recall(self, kv: Tensor, length: int, boundary: int) -> Any:
        self._recall_recent(kv, length, boundary)
        if self.buffer is not None:  # kv is where the prefix is
            return None
        return self._host.read(span(kv, 0, boundary))

    def fill(self, piece: Piece, boundary: int) -> list[Copy]:
        tokens = piece.kv.shape[1]
        count = min(tokens, max(0, boundary - piece.start))
        prefix = Piece(
            piece.head,
            piece.start,
            span(piece.kv, 0, count),
        )
        for destination, source in copies_to(self._host.kv, prefix):
            destination.copy_(source)
        if count == tokens:
            return []
        first = piece.start + count - boundary
        recent = Piece(
            piece.head,
            first,
            span(piece.kv, count, tokens),
        )
        return copies_to(self._tail, recent)

    def excerpt(self, length: int, boundary: int, link: Link) -> Excerpt:
        recent = self._recent_on_host(length - boundary, link)
        prefix = span(self._host.kv, 0, boundary)

        def of_head(head: int, start: int, end: int) -> Tensor:
            near = recent[:, head]
            kept = span(prefix[:, head], start, end)
            if end <= boundary:
                return kept
            first = max(0, start - boundary)
            last = end - boundary
            parts = kept, span(near, first, last)
            return torch.cat(parts, dim=1)

        return of_head

    def _recent_on_host(self, count: int, link: Link) -> Tensor:
        """Return a copy of the recent tokens (2, Hkv, count, D): the tail is about to move on."""
        recent = span(self._tail, 0, count)
        copy = link.fetch(recent)
        return copy.clone()

    def _recall_recent(self, kv: Tensor, length: int, boundary: int) -> None:
        """Copy the tokens behind the boundary to where they stand in kv."""
        count = length - boundary
        recent = span(self._tail, 0, count)
        span(kv, boundary, length).copy_(recent)

    def _keep_recent(self, kv: Tensor, start: int, boundary: int) -> Tensor:
        """Keep of a prompt's tokens those behind the boundary; return the others' KV."""
        tokens = kv.shape[2]
        count = min(tokens, max(0, boundary - start))
        if count < tokens:
            at = start + count - boundary
            span(self._tail, at, at + tokens - count).copy_(span(kv, count, tokens))
        return span(kv, 0, count)
