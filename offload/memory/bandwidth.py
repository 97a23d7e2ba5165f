"""The bandwidth of a link, measured with large copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from offload.memory.link import Link

T = TypeVar("T")
_COPY = 128 << 20  # bytes
_BUSY = 48  # copies in flight during `call_while_copying`


class BandwidthProbe:
    """Large copies between the link's host memory and the device, one after another."""

    def __init__(self, link: Link, size: int = _COPY):
        """Allocate `size` bytes on both sides. Raises InsufficientMemoryError."""
        self.link = link
        self.size = size
        # pages never written to would all map to one page, in the processor's cache
        self._host = link.host_empty(size, torch.uint8).zero_()
        self._device = torch.zeros(size, dtype=torch.uint8, device=link.device)

    def rate(self, out: bool, seconds: float = 0.5) -> float:
        """Return the bandwidth in bytes/s, measured over so many seconds.

        Other ranks that copy at the same time share the bandwidth. Waiting for a small copy takes
        a fraction of its own time, so the number of copies per wait grows.
        """
        self._copy(out)
        self.link.drain()
        copied, concurrency = 0, 1
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds or not copied:
            for _ in range(concurrency):
                self._copy(out)
            self.link.drain()
            copied += concurrency
            if elapsed < seconds / 8:  # a later increase would overrun the time
                concurrency *= 2
        return copied * self.size / elapsed

    def call_while_copying(self, function: Callable[[], T]) -> T:
        """Call a function while copies to the device are in flight; return its result.

        Idle links report a lower speed.
        """
        for _ in range(_BUSY):
            self._copy(out=False)
        result = function()
        self.link.drain()
        return result

    def close(self) -> None:
        self.link.release(self._host)

    def _copy(self, out: bool) -> None:
        inward = (self._device, self._host)  # destination, source
        self.link.copy([inward[::-1] if out else inward])
