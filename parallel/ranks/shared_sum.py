"""Sums of large tensors through host memory that the ranks of one machine share.

Two GPUs without peer access exchange everything through host memory. NCCL does so with kernels, at
a fraction of the links' rates. Here each rank copies its tensor to the shared memory piece by piece
with a copy engine, copies the others' pieces to its device, and adds them: of n bytes, n go out and
n (ranks - 1) come in, at the same time. With two ranks that is as little as there can be.
"""

from __future__ import annotations

import ctypes
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from parallel.ranks.environment import RankLost
from parallel.ranks.shared_memory import READ, WRITTEN, SharedMemory

AsyncSum = Callable[[], Tensor]  # waits for a sum in progress, and returns its result
PIECE_BYTES = 2 << 20
SLOTS = 4  # pieces of a rank that may be written before another has read them
RANK_BYTES = SLOTS * PIECE_BYTES  # shared memory of each rank
_SERIAL = 1 << 14  # elements of an operation that torch does not distribute over threads
_PATIENCE_S = 0.01  # time of waiting before each look whether the other ranks are alive
_POLL_S = 5e-5


class Lane(ABC):
    """Work in order: of a thread, or a GPU's stream."""

    @abstractmethod
    def wait(self, counter: int, value: int) -> None:
        """Continue once a counter has reached a value."""

    @abstractmethod
    def post(self, counter: int, value: int) -> None:
        """Set a counter once the work so far is done."""

    @abstractmethod
    def follow(self, lane: Lane) -> None:
        """Continue once another lane's work so far is done."""

    @abstractmethod
    def write(self, slot: Tensor, piece: Tensor) -> None:
        """Copy a piece to the shared memory."""

    @abstractmethod
    def read(self, slot: Tensor, rank: int) -> Tensor:
        """Return a rank's piece in the shared memory where operations of this device read it."""

    @abstractmethod
    def add(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Write the sum of the parts, added in this order, to `out`, which may be one of them."""


class SharedSum(ABC):
    """Sums over the ranks of one machine. All ranks start the same sums in the same order."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory
        self.is_faster = False  # than the backend's: whether it makes large all-reduces
        self.written_bytes = 0  # total of this rank
        self.read_bytes = 0
        self._pieces = 0  # in all sums
        self._slots = [list(own.view(SLOTS, PIECE_BYTES)) for own in memory.data]

    @abstractmethod
    def start(self, x: Tensor) -> AsyncSum:
        """Start to sum a contiguous x over the ranks, in place."""

    @abstractmethod
    def drain(self, seconds: float) -> bool:
        """Return whether all sums are complete within so many seconds."""

    def close(self) -> None:
        """Leave; no sum may follow."""
        self.memory.close()

    def _exchange(self, x: Tensor, out: Lane, into: Lane) -> None:
        """Sum x piece by piece: `out` writes this rank's, `into` reads the others' and adds.

        The order of addition is that of the ranks, everywhere and at all sizes.
        """
        memory, rank = self.memory, self.memory.rank
        others = [other for other in range(memory.size) if other != rank]
        for piece in x.view(-1).split(PIECE_BYTES // x.itemsize):
            number, index = self._pieces, self._pieces % SLOTS
            self._pieces += 1
            slots = [own[index][: piece.nbytes].view(x.dtype) for own in self._slots]
            for other in others:
                out.wait(memory.counter(other, READ), number + 1 - SLOTS)
            out.write(slots[rank], piece)
            out.post(memory.counter(rank, WRITTEN), number + 1)
            for other in others:
                into.wait(memory.counter(other, WRITTEN), number + 1)
            parts = [
                piece if other == rank else into.read(slots[other], other)
                for other in range(memory.size)
            ]
            into.follow(out)  # it still reads the piece
            into.add(parts, piece)
            into.post(memory.counter(rank, READ), number + 1)
            self.written_bytes += piece.nbytes
            self.read_bytes += len(others) * piece.nbytes


def has_ordered_writes() -> bool:
    """Return whether other processors see this one's writes in order, as `HostSum` requires."""
    return platform.machine().lower() in ("x86_64", "amd64")


class HostSum(SharedSum):
    """Sums on a CPU, in a thread, while the caller computes."""

    def __init__(self, memory: SharedMemory):
        """Raises TierForceError if the system cannot tell whether the other ranks live."""
        super().__init__(memory)
        memory.watch_ranks()
        self._lane = _HostLane(memory)
        self._thread = ThreadPoolExecutor(1, "shared-sum")

    def start(self, x: Tensor) -> AsyncSum:
        done = self._thread.submit(self._run, x)

        def finish() -> Tensor:
            done.result()
            return x

        return finish

    def drain(self, seconds: float) -> bool:
        return not wait([self._thread.submit(int)], seconds).not_done

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    @torch.inference_mode()
    def _run(self, x: Tensor) -> None:
        self._exchange(x, self._lane, self._lane)


class _HostLane(Lane):
    """What the thread does at once. Its operations use no other threads, since the caller's do."""

    def __init__(self, memory: SharedMemory):
        self._memory = memory

    def wait(self, counter: int, value: int) -> None:
        """Wait for other ranks. Raises RankLost if one has ended."""
        look_at = time.monotonic() + _PATIENCE_S
        while self._memory.count(counter) < value:
            time.sleep(_POLL_S)
            if time.monotonic() < look_at:
                continue
            is_lost = self._memory.is_rank_lost()
            if is_lost and self._memory.count(counter) < value:
                raise RankLost("another rank ended unexpectedly (killed, or out of memory).")
            look_at += _PATIENCE_S

    def post(self, counter: int, value: int) -> None:
        self._memory.set_count(counter, value)

    def follow(self, lane: Lane) -> None:
        pass  # there is only one

    def write(self, slot: Tensor, piece: Tensor) -> None:
        # unlike a tensor copy, memmove takes neither the GIL nor compute threads
        ctypes.memmove(slot.data_ptr(), piece.data_ptr(), piece.nbytes)

    def read(self, slot: Tensor, rank: int) -> Tensor:
        return slot

    def add(self, parts: Sequence[Tensor], out: Tensor) -> None:
        blocks = [part.split(_SERIAL) for part in (*parts, out)]
        for *block, sum_out in zip(*blocks, strict=True):
            add_in_order(block, sum_out)


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write parts[0] + parts[1] + ..., added in this order, to `out`, which may be one of them."""
    total = parts[0]
    for part in parts[1:-1]:
        total = total + part
    torch.add(total, parts[-1], out=out)
