"""What a device and its link can do, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from offload import Link
from parallel import Group

T = TypeVar("T")
_COPY, _SUM = 128 << 20, 16 << 20  # bytes
_REPEATS = 5
_BUSY = 48  # copies that keep a link busy while something is asked


class Copies:
    """Large copies between the link's host memory and the device, one after another."""

    def __init__(self, link: Link, size: int = _COPY):
        """Allocates `size` bytes on both sides. Raises FitError."""
        self.link, self.size = link, size
        # pages that were never written would all be one page, in the processor's cache
        self._host = link.host_empty(size, torch.uint8).zero_()
        self._device = torch.zeros(size, dtype=torch.uint8, device=link.device)

    def rate(self, out: bool, seconds: float = 0.5) -> float:
        """Bytes a second, over so many seconds: other ranks that copy at the same time have their share of it."""
        self._copy(out)
        self.link.drain()
        started, copied = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - started) < seconds or not copied:
            self._copy(out)
            self.link.drain()
            copied += self.size
        return copied / elapsed

    def meanwhile(self, ask: Callable[[], T]) -> T:
        """What `ask` says while copies towards the device are under way: links that are idle report a lower speed."""
        for _ in range(_BUSY):
            self._copy(out=False)
        answer = ask()
        self.link.drain()
        return answer

    def close(self) -> None:
        self.link.release(self._host)

    def _copy(self, out: bool) -> None:
        self.link.copy([(self._host, self._device) if out else (self._device, self._host)])


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of one large matrix product: what arithmetic could reach here at most."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b)


def sum_seconds(group: Group, size: int) -> float:
    """One all-reduce of `size` bytes, on all ranks at once."""
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=group.device)
    return _seconds(lambda: group.all_reduce(x))


def sum_rate(group: Group, size: int = _SUM) -> float:
    """Bytes a second of a large all-reduce."""
    return size / sum_seconds(group, size)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Of one of several runs on the device, with one wait for all; the least of a few times, the first of which does not count."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(_REPEATS):
            out = work()
        out.flatten()[0].item()
        times.append((time.perf_counter() - started) / _REPEATS)
    return min(times[1:])
