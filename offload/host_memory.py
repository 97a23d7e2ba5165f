"""Host memory: how much there is, how much a process held, and allocating it or saying why not."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from offload.errors import FitError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def host_available() -> int:
    """Return the bytes of host memory that can really be had.

    It is the kernel's estimate, or less where a cgroup sets a limit.
    """
    available = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            with open(limit) as top, open(used) as now:
                available = min(available, max(0, int(top.read()) - int(now.read())))
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
    return available


def process_peak() -> int | None:
    """Return the most bytes that this process has held since the last call.

    None where the system does not say. It makes the kernel forget the peak, also for others who
    ask (ru_maxrss).
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        Path("/proc/self/clear_refs").write_text("5")  # which forgets the peak
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), None)


def give_back() -> None:
    """Return to the system what this process has freed and still holds.

    Caches of texts come and go in all sizes. Where several are there at once, what glibc keeps of
    them between others grew by a third in 500 documents. It takes milliseconds.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of host memory. Raises FitError where there is not as much."""
    import torch  # here alone: plans ask how much memory there is, and do without torch

    needed, available = numel * dtype.itemsize, host_available()
    if needed > available:
        raise FitError(
            f"the KV cache needs {needed / 1e9:.2f} GB of host memory on this rank and "
            f"{available / 1e9:.2f} GB are available. Use a shorter `context`, or a machine with "
            "more memory."
        )
    with torch.inference_mode(False):  # others than passes write to it, too
        return torch.empty(numel, dtype=dtype)
