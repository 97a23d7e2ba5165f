"""What a device and a group reach, measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from parallel.group import Group

_SUM = 16 << 20  # bytes
_REPEATS = 5


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
    """Of one of several runs on the device, with one wait for all; the least of a few times, the
    first of which does not count.
    """
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(_REPEATS):
            out = work()
        out.flatten()[0].item()
        times.append((time.perf_counter() - started) / _REPEATS)
    return min(times[1:])
