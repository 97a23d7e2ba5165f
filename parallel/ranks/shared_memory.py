"""Memory that the ranks of one machine share, with counters by which they wait for each other."""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from offload.errors import TierForceError, one_line
from offload.layout import ceil_div
from offload.memory.numa import on_node

_STRIDE = 8  # int64 numbers from one counter to the next: each has a cache line of its own
# kinds of counters: pieces that a rank has written, pieces that it has read, whether it has left
WRITTEN, READ, LEFT = range(3)
_KINDS = 3
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
        """Use memory that all ranks have mapped; `pids` are their process ids in rank order."""
        self.rank, self.size = rank, len(pids)
        self.buffer = torch.frombuffer(mapped, dtype=torch.uint8)  # counters and data
        start = _header_bytes(len(pids))
        self.data = self.buffer[start:].view(len(pids), -1)
        self._counters = np.frombuffer(mapped, np.int64, start // 8)
        self._pids = pids
        self._ends = select.poll()
        self._files: list[int] = []  # readable from a process's end, even before its parent knows

    @classmethod
    def open(cls, group: Ranks, nbytes: int, node: int | None = None) -> SharedMemory | None:
        """Map `nbytes` bytes of each rank on all ranks, which all call it.

        None if they run on several machines, or in several containers. `node`: the NUMA node where
        this rank's bytes should be. Raises TierForceError, on all ranks, if the system refuses.
        """
        file = -1
        try:
            with _refusals(group):
                place = _place()
                if group.rank == 0:
                    file = os.memfd_create("tierforce")
                    os.ftruncate(file, _header_bytes(group.size) + group.size * nbytes)
            processes = group.gather(_Process(place, os.getpid(), file))
            if len({process.place for process in processes}) > 1:
                return None
            with _refusals(group):
                if group.rank != 0:
                    first = processes[0]
                    file = os.open(f"/proc/{first.pid}/fd/{first.file}", os.O_RDWR)
                start = _header_bytes(group.size) + group.rank * nbytes
                with on_node(node):
                    # allocated now: a page that is missing later would end the process
                    os.posix_fallocate(file, start, nbytes)
                os.posix_fallocate(file, 0, _header_bytes(group.size))
                mapped = mmap.mmap(file, 0)
            return cls(mapped, group.rank, [process.pid for process in processes])
        finally:
            if file >= 0:
                os.close(file)

    def watch_ranks(self) -> None:
        """Let `is_rank_lost` know of processes that end.

        Raises TierForceError if the system cannot tell.
        """
        try:
            for pid in self._pids:
                if pid != os.getpid():
                    self._files.append(os.pidfd_open(pid))
                    self._ends.register(self._files[-1], select.POLLIN)
        except (OSError, AttributeError) as error:
            raise TierForceError(
                f"the ranks cannot watch each other ({one_line(error)})"
            ) from error

    def counter(self, rank: int, kind: int) -> int:
        """Return the index of a rank's counter of one kind."""
        return (_KINDS * rank + kind) * _STRIDE

    def count(self, counter: int) -> int:
        """Return the value of a counter."""
        return int(self._counters[counter])

    def set_count(self, counter: int, value: int) -> None:
        """Set a counter. On x86, others see what this thread wrote before by then."""
        self._counters[counter] = value

    def is_rank_lost(self) -> bool:
        """Return whether another rank has ended, or left."""
        left = (self.count(self.counter(rank, LEFT)) for rank in range(self.size))
        return any(left) or bool(self._ends.poll(0))

    def release(self) -> None:
        """Satisfy all waits for a counter, of all ranks; no sum may follow."""
        self._counters.fill(_RELEASED)

    def close(self) -> None:
        """Tell the other ranks that this one leaves."""
        self.set_count(self.counter(self.rank, LEFT), 1)
        while self._files:
            os.close(self._files.pop())


def _header_bytes(ranks: int) -> int:
    """Return the bytes of the counters of so many ranks, in whole pages."""
    return ceil_div(8 * _STRIDE * _KINDS * ranks, mmap.PAGESIZE) * mmap.PAGESIZE


def _place() -> tuple[str, str]:
    """Return the machine since its start, and this process's namespace of process ids.

    Raises OSError.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")


@contextmanager
def _refusals(group: Ranks) -> Iterator[None]:
    """Raise a TierForceError, on all ranks, for an error of the system on any."""
    with group.sync_errors():
        try:
            yield
        except (OSError, ValueError, AttributeError) as error:
            raise TierForceError(f"the ranks cannot share memory ({one_line(error)})") from error
