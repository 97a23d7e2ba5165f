"""The link between host and device memory: the interface.

Links are, with the process group, the only code that knows what the device is. There are three. On
a GPU, pinned memory, copy streams and events (`cuda_link`). On a CPU, either no copy at all, since
host memory is device memory there, or an emulated link that really copies, at a set rate, so that
overlap and races show without a GPU (`cpu_link`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from offload.memory.host import process_peak_bytes

Copy = tuple[Tensor, Tensor]  # destination, source: contiguous blocks of one size


def copies_by_head(destination: Tensor, source: Tensor) -> list[Copy]:
    """Return the copies, each of one contiguous block, that take source (parts, H, T, D) there."""
    parts, count = source.shape[:2]
    heads = product(range(parts), range(count))
    return [(destination[part, head], source[part, head]) for part, head in heads]


class Link(ABC):
    """A way for copies, which run in the order they are asked for, in one lane or the other.

    A ticket stands for a copy; `wait` orders later compute after it.
    """

    # False where host memory is device memory: callers then work on the host store itself
    copies = True
    l2_bytes: int | None = None  # of the device's second-level cache; None where it is host memory
    device_name = ""  # what the driver calls the device

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat host buffer of exactly this size.

        Raises InsufficientMemoryError when the host cannot give it.
        """

    @abstractmethod
    def copy(self, pairs: Sequence[Copy]) -> Any:
        """Start copying, in either direction, after all compute issued so far; return a ticket."""

    def copy_out(self, pairs: Sequence[Copy]) -> Any:
        """Start copying to the host as `copy` does, but beside it: the link works both ways.

        Such copies keep order among themselves alone. Nothing may read what they write, nor write
        it, before the link was drained.
        """
        return self.copy(pairs)

    def finish_compute(self) -> None:
        """Block until all compute issued so far is over."""

    def read_to_host(self, kv: Tensor) -> Tensor:
        """Return kv (parts, H, T, D), whose compute is over, in host memory: a copy, or kv itself.

        Other threads than the one that computes may call it.
        """
        return kv

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Let compute issued from here on see the copy finished."""

    @abstractmethod
    def device_available(self) -> int:
        """Return the bytes of device memory that could be allocated now."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes in use since the last call; None where the system does not say.

        Of device memory it is what torch allocated; where that is host memory, all of this process.
        """
        return process_peak_bytes()

    def release(self, buffer: Tensor) -> None:
        """Let go of a buffer from host_empty before it is freed: its copies are over then."""
        self.drain()

    def drain(self) -> None:
        """Block until no copy is under way."""

    def close(self) -> None:
        """Release what the link holds; no copy may follow."""
