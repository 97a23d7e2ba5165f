"""Memory that the ranks of one machine share, with counters by which they wait for each other."""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from offload.errors import TierForceError, one_line
from offload.layout import ceil_div

_STRIDE = 8  # int64 numbers from one counter to the next: each has a cache line of its own
_KINDS = 3  # counters per rank: pieces written, pieces read, and whether it has left
_LEFT = 2
_RELEASED = 1 << 62


class Ranks(Protocol):
    """The part of a process group that is needed to share memory."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""

    def sync_errors(self) -> AbstractContextManager[None]:
        """Raise on all ranks a TierForceError raised on any."""


class _Process(NamedTuple):
    """What a rank tells the others about its process."""

    place: tuple[str, str]  # its machine, and its namespace of process ids
    pid: int
    file: int  # descriptor of the memory, on rank 0


class SharedMemory:
    """Bytes that all ranks of one machine have mapped, and counters of each rank.

    Rank 0 creates anonymous memory (memfd_create), and the others open it through /proc. Unlike a
    file in /dev/shm, it is not limited to the 64 MB of a container, and never left over: the kernel
    frees it with the last of the processes.
    """

    def __init__(self, mapped: mmap.mmap, rank: int, pids: list[int]):
        """Use memory that all ranks have mapped; `pids` are their process ids in rank order.

        Raises OSError or AttributeError if the system cannot tell when a process ends.
        """
        self.rank, self.size = rank, len(pids)
        self.buffer = torch.frombuffer(mapped, dtype=torch.uint8)  # counters and data
        start = _header_bytes(len(pids))
        self.data = self.buffer[start:]
        self._counters = np.frombuffer(mapped, np.int64, start // 8)
        self._ends = select.poll()
        self._files: list[int] = []  # readable from a process's end, even before its parent knows
        for pid in pids:
            if pid != os.getpid():
                self._files.append(os.pidfd_open(pid))
                self._ends.register(self._files[-1], select.POLLIN)

    @classmethod
    def open(cls, group: Ranks, nbytes: int) -> SharedMemory:
        """Map `nbytes` bytes on all ranks, which all call it.

        Raises TierForceError, on all of them, if they run on several machines, or if the system
        refuses.
        """
        file = -1
        try:
            with _refusals(group):
                file = os.memfd_create("tierforce") if group.rank == 0 else -1
            processes = group.gather(_Process(_place(), os.getpid(), file))
            total = _header_bytes(group.size) + nbytes
            with _refusals(group):
                if len({process.place for process in processes}) > 1:
                    raise OSError("they run on several machines, or in several containers")
                if group.rank == 0:
                    # reserved now: a page that is missing later would end the process
                    os.posix_fallocate(file, 0, total)
            with _refusals(group):
                if group.rank != 0:
                    first = processes[0]
                    file = os.open(f"/proc/{first.pid}/fd/{first.file}", os.O_RDWR)
                mapped = mmap.mmap(file, total)
                return cls(mapped, group.rank, [process.pid for process in processes])
        finally:
            if file >= 0:
                os.close(file)

    def counter(self, rank: int, kind: int) -> int:
        """Return the index of a rank's counter: kind 0 of pieces written, 1 of pieces read."""
        return (_KINDS * rank + kind) * _STRIDE

    def address(self, counter: int) -> int:
        """Return the address of a counter."""
        return self.buffer.data_ptr() + 8 * counter

    def count(self, counter: int) -> int:
        """Return the value of a counter."""
        return int(self._counters[counter])

    def set_count(self, counter: int, value: int) -> None:
        """Set a counter. On x86, others see what this thread wrote before by then."""
        self._counters[counter] = value

    def is_rank_lost(self) -> bool:
        """Return whether another rank has ended, or left."""
        left = (self.count(self.counter(rank, _LEFT)) for rank in range(self.size))
        return any(left) or bool(self._ends.poll(0))

    def release(self) -> None:
        """Satisfy all waits for a counter, of all ranks; no sum may follow."""
        self._counters.fill(_RELEASED)

    def close(self) -> None:
        """Tell the other ranks that this one leaves."""
        self.set_count(self.counter(self.rank, _LEFT), 1)
        while self._files:
            os.close(self._files.pop())


def _header_bytes(ranks: int) -> int:
    """Return the bytes of the counters of so many ranks, in whole pages."""
    return ceil_div(8 * _STRIDE * _KINDS * ranks, mmap.PAGESIZE) * mmap.PAGESIZE


def _place() -> tuple[str, str]:
    """Return the machine since its start, and this process's namespace of process ids."""
    place = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            place.append(os.readlink(path) if Path(path).is_symlink() else Path(path).read_text())
    return place[0], place[-1]


@contextmanager
def _refusals(group: Ranks) -> Iterator[None]:
    """Raise a TierForceError, on all ranks, for an error of the system on any."""
    with group.sync_errors():
        try:
            yield
        except (OSError, ValueError, AttributeError) as error:
            raise TierForceError(f"the ranks cannot share memory ({one_line(error)})") from error
