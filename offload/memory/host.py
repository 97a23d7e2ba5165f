"""Host memory: how much is available, peak usage, and allocation with clear errors."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div

# Linux: MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE and MADV_POPULATE_WRITE
_DONT_FORK, _DO_FORK, _HUGE_PAGES, _POPULATE = 10, 11, 14, 23
# cgroups by folder, versions 2 and 1: files of the limit and the usage, and the fields of
# memory.stat that count page cache, which the kernel reclaims before it refuses memory
_CGROUPS = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
_MAX_THREADS = 8  # more are limited by memory bandwidth when clearing pages

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def host_available(
    cgroups: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
) -> int:
    """Return the bytes of host memory available to this process.

    It is the kernel's estimate, or less if a cgroup sets a limit. Page cache counts as free, both
    the machine's and a cgroup's.

    Args:
        cgroups: mount point of the cgroup file systems.
        own: file that lists the cgroups of this process.
    """
    available = psutil.virtual_memory().available
    for kind, (limit, usage, page_cache) in _CGROUPS.items():
        path = PurePosixPath(_own_cgroup(own, kind))
        for part in (path, *path.parents):  # limits of parent cgroups apply, too
            cgroup = cgroups / kind / str(part).lstrip("/")
            try:
                max_bytes = int((cgroup / limit).read_text())
                used_bytes = int((cgroup / usage).read_text())
            except (OSError, ValueError):  # no such cgroup version, or "max"
                continue
            stat = ""
            with suppress(OSError):
                stat = (cgroup / "memory.stat").read_text()
            for line in stat.splitlines():
                name, _, count = line.partition(" ")
                if name in page_cache:
                    used_bytes -= int(count)
            available = min(available, max(0, max_bytes - used_bytes))
    return available


def _own_cgroup(own: Path, kind: str) -> str:
    """Return the path of this process's cgroup: version 2 (kind ""), or a controller of version 1.

    It is / if the system does not list it, as in most containers.
    """
    lines = ""
    with suppress(OSError):
        lines = own.read_text()
    for line in lines.splitlines():
        _, kinds, path = line.split(":", 2)
        if kind in kinds.split(","):
            return path
    return "/"


def process_peak_bytes() -> int | None:
    """Return the peak memory usage of this process since the last call, in bytes.

    None if the system does not report it. The call resets the kernel's peak, and with it other
    readings of it (ru_maxrss).
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), None)


def trim_heap() -> None:
    """Return memory that this process has freed to the system (malloc_trim).

    Requests have caches of all sizes. With several at once, the fragments that glibc retains grew
    memory usage by a third in 500 documents. The call takes milliseconds.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of host memory; raise InsufficientMemoryError if it does not fit."""
    import torch  # not at the top: planning uses this module without torch

    needed, available = numel * dtype.itemsize, host_available()
    if needed > available:
        raise InsufficientMemoryError(
            f"the KV cache needs {needed / 1e9:.2f} GB of host memory on this rank and "
            f"{available / 1e9:.2f} GB are available. Use a shorter `context`, or a machine with "
            "more memory."
        )
    with torch.inference_mode(False):  # it is written to outside of forwards, too
        buffer = torch.empty(numel, dtype=dtype)
    _advise(buffer.data_ptr(), buffer.nbytes, _HUGE_PAGES)
    return buffer


def prefault(buffer: Tensor) -> None:
    """Fault in all pages of a new buffer, in several threads.

    The first access to a page waits until it is cleared, and pinning accesses all pages in one
    thread. Pages are allocated on the NUMA node of the calling thread (`offload.memory.numa`).
    """
    first, nbytes = buffer.data_ptr(), buffer.nbytes
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    share = max(1, ceil_div(nbytes, threads))

    def populate(start: int) -> None:
        # on an older kernel this does nothing, and pinning faults them in
        _advise(first + start, min(share, nbytes - start), _POPULATE)

    with ThreadPoolExecutor(threads) as pool:  # threads inherit the CPU affinity
        list(pool.map(populate, range(0, nbytes, share)))


def exclude_from_forks(buffer: Tensor, exclude: bool) -> None:
    """Exclude a buffer's pages from forked processes, or include them again.

    A fork copies pinned pages at once, which takes time and as much memory again. Must be undone
    before the buffer is freed: later allocations in those pages must survive a fork.
    """
    _advise(buffer.data_ptr(), buffer.nbytes, _DONT_FORK if exclude else _DO_FORK)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Advise the kernel on the whole pages in a range (madvise), ignoring errors."""
    first = ceil_div(address, PAGESIZE) * PAGESIZE
    end = (address + nbytes) // PAGESIZE * PAGESIZE
    count = max(0, end - first)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), advice)
