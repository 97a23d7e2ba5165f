"""What a device and its link can do, measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from offload import Link

_COPY = 128 << 20  # bytes
_REPEATS = 5


def best_seconds(work: Callable[[], object]) -> float:
    """The least of a few runs, the first of which does not count."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def copy_rate(link: Link, out: bool, size: int = _COPY) -> float:
    """Bytes a second of large copies between the link's host memory and the device, one after another."""
    host = link.host_empty(size, torch.uint8).zero_()  # pages that were never written would be one page, in the processor's cache
    device = torch.zeros(size, dtype=torch.uint8, device=link.device)
    pair = (host, device) if out else (device, host)

    def copy() -> None:
        link.copy([pair])
        link.drain()

    rate = size / best_seconds(copy)
    link.release(host)
    return rate


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of one large matrix product: what arithmetic could reach here at most."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: (a @ b)[0, 0].item())
