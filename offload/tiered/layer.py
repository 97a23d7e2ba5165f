"""The interface of one layer of the target's cache, wherever its KV is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from offload.memory.link import Copy, Link
from offload.tiered.kv_file import HostReader, KVBlock
from offload.traffic import ByteCounters


class Notify(Protocol):
    """Notifies observers of a layer's attention (`AttentionObserver.on_attention`)."""

    def __call__(self, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None: ...


def notify_none(head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
    """Notify no observer: for forwards that are not the target's own."""


class TieredLayer(ABC):
    """The KV of one layer, wherever it is stored. Keys and queries passed in are rotated.

    The cache's boundary splits its tokens into a prefix and a tail. A forward asks a layer for
    `chunks`, then calls `append` and `attend`. Before a forward the boundary may move:
    `offload_block` and `shift_tail`. A prompt arrives in blocks, built in `buffer` and passed to
    `store`.
    """

    is_deferred = False  # whether `onload_deferred` is yet to be called
    is_on_device = False  # whether every token has KV on the device, for `attend_on_device`
    is_split = False  # whether prefill has to build its KV in the staging buffer
    is_batch_invariant = False  # whether `attend` reduces in blocks at fixed positions

    def chunks(self, boundary: int) -> Sequence[Tensor]:
        """Return the chunks that a forward streams through the ring, in order."""
        return ()

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        """Write k and v (T, Hkv, D) of tail tokens from `start` on."""

    @abstractmethod
    def attend(self, q: Tensor, end: int, boundary: int, notify: Notify) -> Tensor:
        """Return the attention (T, Hq, D) of q (T, Hq, D), the last T of `end` tokens.

        Calls `notify` for each group of heads, while all its keys and values are on the device.
        """

    def attend_on_device(self, q: Tensor, end: int, boundary: int, traffic: ByteCounters) -> Tensor:
        """Approximate `attend` from what the device holds, if the layer `is_on_device`.

        Attended bytes are counted in `traffic`.
        """
        raise NotImplementedError

    def offload_block(self, boundary: int, count: int) -> Any:
        """Start writing the `count` tokens after the boundary to where the prefix is.

        Returns the link's ticket; None if there is nothing to write.
        """
        return None

    def shift_tail(self, count: int, rest: int) -> None:
        """Drop the first `count` tail tokens, now written back; `rest` follow them."""

    @property
    def buffer(self) -> Tensor | None:
        """The memory (2, Hkv, N, D) to build a prompt's KV in; None for the staging buffer."""
        return None

    @abstractmethod
    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        """Store KV (2, Hkv, T, D) of a prompt's tokens from `start` on, built in buffer or staging.

        `boundary` is that of the whole prompt. Returns a ticket if a copy reads kv, else None.
        """

    def finish_prefill(self) -> None:
        """Finish deferred work. Called once, after `store` has received the whole prompt."""

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
