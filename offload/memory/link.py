"""The interface of links between host and device memory.

Links and the process group are the only code that depends on the type of device. There are three.
On a GPU: pinned memory, copy streams and events (`cuda_link`). On a CPU: either no copies, since
host memory is device memory, or an emulated link that does copy, at a fixed rate, to show overlap
and races without a GPU (`cpu_link`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from offload.memory.host import process_peak_bytes

Copy = tuple[Tensor, Tensor]  # destination, source: contiguous blocks of equal size


def copies_by_head(destination: Tensor, source: Tensor) -> list[Copy]:
    """Return copies of contiguous blocks, one per head of source (parts, H, T, D)."""
    parts, heads = source.shape[:2]
    indices = product(range(parts), range(heads))
    return [(destination[part, head], source[part, head]) for part, head in indices]


class Link(ABC):
    """Asynchronous copies between host and device memory, in order.

    Copies of `copy_out` may have a queue of their own. A ticket identifies a copy; `wait` orders
    later compute after it.
    """

    # False if host memory is device memory: callers then use the host store itself
    copies = True
    device_name = ""  # name of the device reported by the driver

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat host buffer of exactly this size.

        Raises InsufficientMemoryError if host memory does not suffice.
        """

    @abstractmethod
    def copy(self, pairs: Sequence[Copy]) -> Any:
        """Start copies, in either direction, after all compute issued so far; return a ticket."""

    def copy_out(self, pairs: Sequence[Copy]) -> Any:
        """Start copies to the host like `copy`, but concurrent with its copies (full duplex).

        They are ordered only among themselves. Their destinations must be neither read nor written
        before the link is drained.
        """
        return self.copy(pairs)

    def finish_compute(self) -> None:
        """Block until all compute issued so far is complete."""

    def read_to_host(self, kv: Tensor) -> Tensor:
        """Return kv (parts, H, T, D), whose compute is complete, in host memory: a copy, or itself.

        It may be called from any thread.
        """
        return kv

    def read_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Start reading a small tensor; the returned function waits for it, and returns it.

        It is in host memory.
        """
        return lambda: x

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Order compute issued from now on after the copy."""

    @abstractmethod
    def is_complete(self, ticket: Any) -> bool:
        """Return whether a copy has completed, without waiting."""

    @abstractmethod
    def device_available(self) -> int:
        """Return the bytes of device memory that can be allocated now."""

    def peak_bytes(self) -> int | None:
        """Return the peak memory usage since the last call, in bytes; None if it is not known.

        For a GPU it is torch's allocations; if device memory is host memory, the whole process's.
        """
        return process_peak_bytes()

    def release(self, buffer: Tensor) -> None:
        """Release a buffer from host_empty before it is freed, after waiting for its copies."""
        self.drain()

    def drain(self) -> None:
        """Block until no copy is in flight."""

    def close(self) -> None:
        """Release all resources; no copy may follow."""
