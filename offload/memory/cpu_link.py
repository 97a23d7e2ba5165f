"""Links on a CPU: none at all, or one that is emulated at a set rate."""

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
    """No link at all, on a CPU: the ring hands out views of the host store, nothing is copied."""

    copies = False

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(numel, dtype)

    def copy(self, pairs: Sequence[Copy]) -> None:
        for destination, source in pairs:
            destination.copy_(source)

    def wait(self, ticket: None) -> None:
        pass

    def device_available(self) -> int:
        return host_available()


# of a lane: what is to be copied, when that was asked for, and what tells that it is done
Jobs = queue.Queue[tuple[Sequence[Copy], float, threading.Event] | None]


class CopyThread:
    """Copies that one thread makes, in order."""

    def __init__(self, run: Callable[[Jobs], None]):
        """Start the thread, which takes jobs from its queue until it finds None."""
        self.jobs: Jobs = queue.Queue()
        self._thread = threading.Thread(
            target=run, args=(self.jobs,), name="emulated-link", daemon=True
        )
        self._thread.start()

    def add(self, pairs: Sequence[Copy]) -> threading.Event:
        """Ask for copies; return what is set when they are made."""
        for destination, source in pairs:  # memmove would not notice
            if not (
                destination.is_contiguous()
                and source.is_contiguous()
                and destination.nbytes == source.nbytes
            ):
                raise ValueError("the link moves contiguous blocks of one size only")
        done = threading.Event()
        self.jobs.put((pairs, time.perf_counter(), done))
        return done

    def drain(self) -> None:
        """Block until all copies are made."""
        # when Python ends, the thread does not run any more
        if self._thread.is_alive() and not sys.is_finalizing():
            self.add(()).wait()

    def close(self) -> None:
        """End the thread, behind all copies."""
        self.jobs.put(None)
        self._thread.join()


class EmulatedLink(Link):
    """A thread that copies between CPU buffers, in order, while the caller computes.

    Beside it works another for what is sent to the host, as fast: the wire carries both ways.
    """

    def __init__(self, device: torch.device, rate: float):
        """Start the thread; `rate` is in bytes a second."""
        super().__init__(device)
        self.rate = rate
        self._copies = CopyThread(self._run)
        self._sent = CopyThread(self._run)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(numel, dtype)

    def copy(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._copies.add(pairs)

    def copy_out(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._sent.add(pairs)

    def read_to_host(self, kv: Tensor) -> Tensor:
        copy = torch.empty(kv.shape, dtype=kv.dtype)
        self._sent.add(copies_by_head(copy, kv)).wait()
        return copy

    def wait(self, ticket: threading.Event) -> None:
        ticket.wait()

    def drain(self) -> None:
        self._copies.drain()
        self._sent.drain()

    def close(self) -> None:
        self._copies.close()
        self._sent.close()

    def device_available(self) -> int:
        return host_available()

    def _run(self, jobs: Jobs) -> None:
        free_at = time.perf_counter()  # when the wire is next free
        while job := jobs.get():
            pairs, asked_at, done = job
            free_at = max(free_at, asked_at)  # a wire waits for no thread to get a processor
            for destination, source in pairs:
                free_at += source.nbytes / self.rate
                # memmove, for it leaves the lock and the compute threads alone, which a tensor copy
                # does not
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
            if (ahead := free_at - time.perf_counter()) > 0:
                time.sleep(ahead)
            done.set()
