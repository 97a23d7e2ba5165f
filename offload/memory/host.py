"""Host memory: how much there is, how much a process held, and allocating it or saying why not."""

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

# of Linux: MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE and MADV_POPULATE_WRITE
_DONT_FORK, _DO_FORK, _HUGE_PAGES, _POPULATE = 10, 11, 14, 23
# of cgroups by their folder, versions 2 and 1: the limit, what is used, and what of that is page
# cache, which the kernel takes back before it refuses memory
_CGROUPS = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
_MAX_THREADS = 8  # with more, memory is what clearing pages waits for

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def host_available(
    cgroups: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
) -> int:
    """Return the bytes of host memory that can really be had.

    It is the kernel's estimate, or less where a cgroup sets a limit. Page cache counts as free, of
    the machine and of a cgroup alike.

    Args:
        cgroups: where they are mounted.
        own: the file that names those of this process.
    """
    available = psutil.virtual_memory().available
    for kind, (limit, used, page_cache) in _CGROUPS.items():
        path = PurePosixPath(_own_cgroup(own, kind))
        for part in (path, *path.parents):  # the limits of all above it hold, too
            cgroup = cgroups / kind / str(part).lstrip("/")
            try:
                most = int((cgroup / limit).read_text())
                now = int((cgroup / used).read_text())
            except (OSError, ValueError):  # no such cgroup version, or "max"
                continue
            counts = ""
            with suppress(OSError):
                counts = (cgroup / "memory.stat").read_text()
            for line in counts.splitlines():
                name, _, count = line.partition(" ")
                if name in page_cache:
                    now -= int(count)
            available = min(available, max(0, most - now))
    return available


def _own_cgroup(own: Path, kind: str) -> str:
    """Return the path of this process's cgroup of version 2 (kind ""), or of a kind of version 1.

    It is / where the system does not say, as in most containers.
    """
    text = ""
    with suppress(OSError):
        text = own.read_text()
    for line in text.splitlines():
        _, kinds, path = line.split(":", 2)
        if kind in kinds.split(","):
            return path
    return "/"


def process_peak_bytes() -> int | None:
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


def trim_heap() -> None:
    """Return to the system what this process has freed and still holds.

    Caches of texts come and go in all sizes. Where several are there at once, what glibc keeps of
    them between others grew by a third in 500 documents. It takes milliseconds.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of host memory. Raises InsufficientMemoryError where there is not as much."""
    import torch  # here alone: plans ask how much memory there is, and do without torch

    needed, available = numel * dtype.itemsize, host_available()
    if needed > available:
        raise InsufficientMemoryError(
            f"the KV cache needs {needed / 1e9:.2f} GB of host memory on this rank and "
            f"{available / 1e9:.2f} GB are available. Use a shorter `context`, or a machine with "
            "more memory."
        )
    with torch.inference_mode(False):  # others than passes write to it, too
        buffer = torch.empty(numel, dtype=dtype)
    _advise(buffer.data_ptr(), buffer.nbytes, _HUGE_PAGES)
    return buffer


def prefault(buffer: Tensor) -> None:
    """Have the system give all pages of a new buffer at once, by several threads.

    Whoever is the first to touch a page waits until it is cleared, and pinning touches all of them
    in one thread. They come to the node of the thread that calls this (`offload.memory.numa`).
    """
    first, nbytes = buffer.data_ptr(), buffer.nbytes
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    share = max(1, ceil_div(nbytes, threads))

    def populate(start: int) -> None:
        # a kernel that is older than this leaves them to pinning
        _advise(first + start, min(share, nbytes - start), _POPULATE)

    with ThreadPoolExecutor(threads) as pool:  # whose threads inherit this one's CPUs
        list(pool.map(populate, range(0, nbytes, share)))


def exclude_from_forks(buffer: Tensor, keep: bool) -> None:
    """Keep the pages of a buffer from processes that fork off this one, or let them have them.

    A fork copies pinned pages at once, which takes their time and as much memory again. To be
    undone before the buffer is freed: what comes to those pages next must survive a fork.
    """
    _advise(buffer.data_ptr(), buffer.nbytes, _DONT_FORK if keep else _DO_FORK)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Tell the kernel something of the whole pages in a range; it need not listen."""
    first = ceil_div(address, PAGESIZE) * PAGESIZE
    end = (address + nbytes) // PAGESIZE * PAGESIZE
    count = max(0, end - first)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), advice)
