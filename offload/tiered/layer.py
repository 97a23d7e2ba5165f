"""The interface of one layer of the target's cache, wherever its KV is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offload.attention.folding import Partial
from offload.attention.head_major import token_slice
from offload.kernels.group_attention import GroupAttention
from offload.memory.link import Copy, Link
from offload.tiered.kv_file import HostReader, KVBlock
from offload.traffic import ByteCounters


@dataclass(frozen=True)
class KVGroup:
    """A few KV heads of a layer, with all tokens of a forward, while they are on the device.

    It is valid until the layer's next group.
    """

    head: int  # the first of them
    heads: int  # KV heads of the whole layer
    # (2, h, n, D) each, in the order of tokens, the last of which are those of the queries: prefix
    # and tail, or both in one
    segments: Sequence[Tensor]
    tail: Tensor | None = None  # the second segments of all groups together (2, Hkv, n, D)
    start: int = 0  # position of the first token
    window: int | None = None  # tokens that a query sees; None: all up to its own

    def of_queries(self, q: Tensor) -> Tensor:
        """Return the queries of these heads, of the layer's q (T, Hq, D)."""
        own = self.segments[0].shape[1]
        if own == self.heads:
            return q
        count = q.shape[1] // self.heads  # query heads per KV head
        end = self.head + own
        return q[:, self.head * count : end * count]

    def split_at(self, boundary: int) -> tuple[Tensor, Tensor]:
        """Return the tokens before the boundary, and those after it.

        Of a layer with a window they are those that it holds.
        """
        if len(self.segments) == 2:
            prefix, recent = self.segments
            return prefix, recent
        (kv,) = self.segments
        count = max(0, boundary - self.start)
        return token_slice(kv, 0, count), token_slice(kv, count, kv.shape[2])


class TieredLayer(ABC):
    """The KV of one layer, wherever it is stored. Keys and queries passed in are rotated.

    The cache's boundary splits its tokens into a prefix and a tail. A forward asks a layer for
    `chunks`, then calls `append` and attends to its `groups`. Before a forward the boundary may
    move: `offload_block` and `shift_tail`. A prompt arrives in blocks, built in `buffer` and passed
    to `store`.
    """

    is_deferred = False  # whether `onload_deferred` is yet to be called
    is_on_device = False  # whether every token has KV on the device, for `attend_on_device`
    is_split = False  # whether prefill has to build its KV in the staging buffer

    def chunks(self, boundary: int) -> Sequence[Tensor]:
        """Return the chunks that a forward streams through the ring, in order."""
        return ()

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        """Write k and v (T, Hkv, D) of tail tokens from `start` on."""

    @abstractmethod
    def groups(self, end: int, boundary: int) -> Iterator[KVGroup]:
        """Yield all heads of the first `end` tokens, a few at a time, in order."""

    def attend_on_device(
        self, q: Tensor, end: int, boundary: int, traffic: ByteCounters
    ) -> Partial:
        """Approximate attention from what the device holds, if it `is_on_device`.

        q (T, Hq, D) are the last of `end` tokens. Attended bytes are counted in `traffic`.
        """
        raise NotImplementedError

    def offload_block(self, boundary: int, count: int) -> Any:
        """Start writing the `count` tokens after the boundary to where the prefix is.

        Returns the link's ticket; None if there is nothing to write.
        """
        return None

    def shift_tail(self, boundary: int, count: int, rest: int) -> None:
        """Drop the first `count` tail tokens, now written back.

        The `rest` that follow the new boundary stay, those of a draft among them.
        """

    @property
    def buffer(self) -> Tensor | None:
        """The memory (2, Hkv, N, D) to build a prompt's KV in; None for the staging buffer."""
        return None

    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        """Store KV (2, Hkv, T, D) of a prompt's tokens from `start` on, built in buffer or staging.

        `boundary` is that of the whole prompt. Returns a ticket if a copy reads kv, else None. A
        layer with a window has `WindowedLayer.extend` instead.
        """
        raise NotImplementedError

    def finish_store(self) -> None:
        """Read what is left of the KV that was passed to `store`, or `offload_block` took."""

    def load(self, kv: Tensor, length: int, boundary: int) -> Any:
        """Start loading the first `length` tokens into kv (2, Hkv, N, D), `buffer` or staging.

        `boundary` is that of these tokens. Returns the link's ticket, or None if they are there.
        """
        return None

    def truncate(self, length: int) -> None:
        """Mark the prefix as valid for the first `length` tokens only."""

    def load_block(self, block: KVBlock, boundary: int) -> list[Copy]:
        """Store a block of a prompt that is in host memory, if the layer is not `is_split`.

        `boundary` is that of the prompt. Returns the copies to the device still to be made.
        """
        raise NotImplementedError

    @abstractmethod
    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        """Return a reader of the first `length` tokens in host memory.

        `boundary` is that of these tokens, whose compute is over. Another thread may call it during
        forwards, as long as the cache is not truncated below these tokens.
        """

    def onload_deferred(self, length: int, boundary: int) -> None:
        """Start copying a deferred layer of `length` tokens to the device.

        Raises torch.OutOfMemoryError if they do not fit.
        """

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of device memory that this layer has allocated, or holds of the cache's."""


def attend_groups(
    q: Tensor,
    groups: Iterable[KVGroup],
    attention: GroupAttention,
    traffic: ByteCounters,
    observe: Callable[[KVGroup, Tensor], None] | None = None,
) -> Partial:
    """Return the attention of q (T, Hq, D) over all groups of a layer.

    Args:
        q: the rotated queries of the layer's last T tokens.
        groups: the layer's, in order; at least one.
        attention: fast, or batch-invariant.
        traffic: counts the bytes read.
        observe: called with each group and its queries, while its KV is on the device.
    """
    parts = []
    for group in groups:
        queries = group.of_queries(q)
        if group.window is None:
            parts.append(attention.attend(queries, group.segments, traffic))
        else:
            args = queries, group.segments[0], group.start, group.window, traffic
            parts.append(attention.attend_window(*args))
        if observe:
            observe(group, queries)
    return attention.join(parts, q, group.tail, traffic)
