"""Links on a CPU: zero-copy, or emulated at a fixed rate."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.memory.host import allocate, host_available
from offload.memory.link import Copy, Link, copies_by_head


class ZeroCopyLink(Link):
    """No transfers, on a CPU: the ring yields views of the host store."""

    copies = False

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(numel, dtype)

    def copy(self, pairs: Sequence[Copy]) -> None:
        for destination, source in pairs:
            destination.copy_(source)

    def wait(self, ticket: None) -> None:
        pass

    def is_complete(self, ticket: None) -> bool:
        return True

    def device_available(self) -> int:
        return host_available()


# jobs of a copy thread: the copies, the time of the request, and the event set on completion
Jobs = queue.Queue[tuple[Sequence[Copy], float, threading.Event] | None]


class CopyThread:
    """A thread that runs copies in order."""

    def __init__(self, run: Callable[[Jobs], None]):
        """Start the thread; `run` takes jobs from the queue until it gets None."""
        self.jobs: Jobs = queue.Queue()
        self._thread = threading.Thread(
            target=run, args=(self.jobs,), name="emulated-link", daemon=True
        )
        self._thread.start()

    def add(self, pairs: Sequence[Copy]) -> threading.Event:
        """Queue copies; return an event that is set on completion."""
        for destination, source in pairs:  # memmove does not check sizes and strides
            if not (
                destination.is_contiguous()
                and source.is_contiguous()
                and destination.nbytes == source.nbytes
            ):
                raise ValueError("the link only copies between contiguous blocks of equal size")
        done = threading.Event()
        self.jobs.put((pairs, time.perf_counter(), done))
        return done

    def drain(self) -> None:
        """Block until all copies are complete."""
        # the thread no longer runs when Python shuts down
        if self._thread.is_alive() and not sys.is_finalizing():
            self.add(()).wait()

    def close(self) -> None:
        """End the thread after all copies."""
        self.jobs.put(None)
        self._thread.join()


class EmulatedLink(Link):
    """Threads that copy between CPU buffers, in order, while the caller computes.

    Copies out to the host have a thread of their own, of the same rate: the link is full duplex.
    """

    def __init__(self, device: torch.device, rate: float):
        """Start the threads; `rate` is in bytes/s."""
        super().__init__(device)
        self.rate = rate
        self._thread = CopyThread(self._run)
        self._out_thread = CopyThread(self._run)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(numel, dtype)

    def copy(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._thread.add(pairs)

    def copy_out(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._out_thread.add(pairs)

    def read_to_host(self, kv: Tensor) -> Tensor:
        copy = torch.empty(kv.shape, dtype=kv.dtype)
        self._out_thread.add(copies_by_head(copy, kv)).wait()
        return copy

    def wait(self, ticket: threading.Event) -> None:
        ticket.wait()

    def is_complete(self, ticket: threading.Event) -> bool:
        return ticket.is_set()

    def drain(self) -> None:
        self._thread.drain()
        self._out_thread.drain()

    def close(self) -> None:
        self._thread.close()
        self._out_thread.close()

    def device_available(self) -> int:
        return host_available()

    def _run(self, jobs: Jobs) -> None:
        free_at = time.perf_counter()  # time from which the emulated link is idle
        while job := jobs.get():
            pairs, requested_at, done = job
            free_at = max(free_at, requested_at)  # scheduling delays of the thread do not count
            for destination, source in pairs:
                free_at += source.nbytes / self.rate
                # unlike a tensor copy, memmove takes neither the GIL nor compute threads
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
            if (ahead := free_at - time.perf_counter()) > 0:
                time.sleep(ahead)
            # nothing copied may be kept alive until the next job
            destination = source = pairs = job = None  # type: ignore[assignment]
            done.set()
