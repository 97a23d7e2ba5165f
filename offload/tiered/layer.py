"""What the target's cache asks of a layer, wherever its KV lives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from offload.memory.link import Copy, Link
from offload.tiered.kv_file import HostReader, KVBlock
from offload.traffic import ByteCounters


class Notify(Protocol):
    """Shows the cache's followers what a layer attends with, and to what (`Follower.observe`)."""

    def __call__(self, head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None: ...


def notify_none(head: int, q: Tensor, prefix: Tensor, recent: Tensor) -> None:
    """Take the place of `Show` where a pass is not the target's own."""


class TieredLayer(ABC):
    """The KV of one layer, wherever it lives. Keys and queries that come here are rotated.

    The cache's boundary splits its tokens into a prefix and recent ones. A pass asks a layer for
    `chunks`, then calls `put` and `attend`. Before a pass the boundary may move, by `offload_block`
    and `drop`. A prompt comes block by block: it is built in `buffer` and handed to `store`.
    """

    is_deferred = False  # whether `onload_deferred` is still to come
    is_on_device = False  # whether the device holds something of all tokens, to `attend_on_device`
    is_split = False  # whether it can only be filled from what is built in the stage
    is_batch_invariant = False  # whether `attend` goes by blocks at fixed positions

    def chunks(self, boundary: int) -> Sequence[Tensor]:
        """Return what a pass streams of this layer through the ring, in order."""
        return ()

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, start: int, boundary: int) -> None:
        """Write k and v (T, Hkv, D) of recent tokens from `start` on."""

    @abstractmethod
    def attend(self, q: Tensor, end: int, boundary: int, show: Notify) -> Tensor:
        """Return the attention (T, Hq, D) of q (T, Hq, D), which are the last T of `end` tokens.

        Calls `show` for each group of heads, with all its keys and values on the device.
        """

    def attend_on_device(self, q: Tensor, end: int, boundary: int, traffic: ByteCounters) -> Tensor:
        """Return nearly what `attend` does, of layers `is_on_device`, from what the device holds.

        Bytes that are attended to count in `traffic`.
        """
        raise NotImplementedError

    def offload_block(self, boundary: int, count: int) -> Any:
        """Start writing `count` tokens behind the boundary to where the prefix is.

        Returns the link's ticket; None where there is nothing to write.
        """
        return None

    def shift_tail(self, count: int, rest: int) -> None:
        """Forget the first `count` recent tokens, now written back; `rest` stand behind them."""

    @property
    def buffer(self) -> Tensor | None:
        """Where a prompt's KV is built, (2, Hkv, N, D); None for the stage of the prefill."""
        return None

    @abstractmethod
    def store(self, kv: Tensor, start: int, boundary: int) -> Any:
        """Keep KV (2, Hkv, T, D) of a prompt's tokens from `start` on, built in buffer or stage.

        `boundary` is that of the whole prompt. Returns a ticket if a copy reads kv, else None.
        """

    def finish_prefill(self) -> None:
        """Put in its place what `store` has left to be done; all of a prompt was handed to it."""

    def load(self, kv: Tensor, length: int, boundary: int) -> Any:
        """Start bringing the first `length` tokens to kv (2, Hkv, N, D), `buffer` or stage.

        `boundary` is that of these tokens. Returns the link's ticket, or None where they are there.
        """
        return None

    def truncate(self, length: int) -> None:
        """Take note that of the prefix the first `length` tokens stand, and no others."""

    def load_blocks(self, piece: KVBlock, boundary: int) -> list[Copy]:
        """Hold a piece of a text that is in host memory, where the layer is not `is_cut`.

        `boundary` is that of the text. Returns the copies to the device that are left to make.
        """
        raise NotImplementedError

    @abstractmethod
    def host_reader(self, length: int, boundary: int, link: Link) -> HostReader:
        """Return what gives any of the first `length` tokens in host memory.

        `boundary` is that of these tokens, whose compute is over. Another thread may call it while
        passes are made, as long as the tokens stand.
        """

    def onload_deferred(self, length: int, boundary: int) -> None:
        """Start copying a late layer to the device, which holds `length` tokens.

        Raises torch.OutOfMemoryError where there is no room for them.
        """

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of device memory that this layer has allocated, or has of the cache's."""
