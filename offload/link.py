"""The link between host and device memory.

It is the only place, with the process group, that knows what the device is.

Three links, one interface. On a GPU, pinned memory, a copy stream and events. On a CPU, either no
copy at all, for there host memory *is* device memory, or an emulated link that really copies, at a
set rate, so that overlap and races show without a GPU.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from offload.host_memory import allocate, host_available, process_peak
from offload.link_name import emulated_rate, refuse_on_gpu

Copy = tuple[Tensor, Tensor]  # destination, source: contiguous blocks of one size


def by_head(destination: Tensor, source: Tensor) -> list[Copy]:
    """Return the copies, each of one contiguous block, that take source (parts, H, T, D) there."""
    parts, count = source.shape[:2]
    heads = product(range(parts), range(count))
    return [(destination[part, head], source[part, head]) for part, head in heads]


class Link(ABC):
    """A way for copies, which run in the order they are asked for, in one lane or the other.

    A ticket stands for a copy; `wait` orders later compute after it.
    """

    # False where host memory is device memory: callers then work on the host store itself
    copies = True
    # whether the device has a cache for what is written out of 8 bits and read again at once
    suits_int8 = True
    device_name = ""  # what the driver calls the device
    counts_waits = False  # whether `waited` is asked for, and what waits now is to count

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat host buffer of exactly this size.

        Raises FitError when the host cannot give it.
        """

    @abstractmethod
    def copy(self, pairs: Sequence[Copy]) -> Any:
        """Start copying, in either direction, after all compute issued so far; return a ticket."""

    def send(self, pairs: Sequence[Copy]) -> Any:
        """Start copying to the host as `copy` does, but beside it: the link works both ways.

        Such copies keep order among themselves alone. Nothing may read what they write, nor write
        it, before the link was drained.
        """
        return self.copy(pairs)

    def finish_compute(self) -> None:
        """Block until all compute issued so far is over."""

    def fetch(self, kv: Tensor) -> Tensor:
        """Return kv (parts, H, T, D), whose compute is over, in host memory: a copy, or kv itself.

        Other threads than the one that computes may call it.
        """
        return kv

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Let compute issued from here on see the copy finished."""

    def waited(self) -> float:
        """Return the seconds that compute has waited while it counted, since the last call.

        To be called when all compute is over.
        """
        return 0.0

    @contextmanager
    def counting_waits(self, counts: bool) -> Iterator[None]:
        """Count what waits inside, or do not."""
        before, self.counts_waits = self.counts_waits, counts
        try:
            yield
        finally:
            self.counts_waits = before

    @abstractmethod
    def device_available(self) -> int:
        """Return the bytes of device memory that could be allocated now."""

    def peak(self) -> int | None:
        """Return the most bytes in use since the last call; None where the system does not say.

        Of device memory it is what torch allocated; where that is host memory, all of this process.
        """
        return process_peak()

    def release(self, buffer: Tensor) -> None:
        """Let go of a buffer from host_empty before it is freed: its copies are over then."""
        self.drain()

    def drain(self) -> None:
        """Block until no copy is under way."""

    def close(self) -> None:
        """Release what the link holds; no copy may follow."""


class ViewLink(Link):
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


class Lane:
    """Copies that one thread makes, in order."""

    def __init__(self, run: Callable[[Jobs], None]):
        """Start the thread, which takes jobs from its queue until it finds None."""
        self.jobs: Jobs = queue.Queue()
        self._thread = threading.Thread(
            target=run,
            args=(self.jobs,),
            name="emulated-link",
            daemon=True,
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
        now = time.perf_counter()
        self.jobs.put((pairs, now, done))
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
        self._waited = 0.0
        self._copies = Lane(self._run)
        self._sent = Lane(self._run)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(numel, dtype)

    def copy(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._copies.add(pairs)

    def send(self, pairs: Sequence[Copy]) -> threading.Event:
        return self._sent.add(pairs)

    def fetch(self, kv: Tensor) -> Tensor:
        copy = torch.empty(kv.shape, dtype=kv.dtype)
        self._sent.add(by_head(copy, kv)).wait()
        return copy

    def wait(self, ticket: threading.Event) -> None:
        started = time.perf_counter()
        ticket.wait()
        if self.counts_waits:
            self._waited += time.perf_counter() - started

    def waited(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited

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


def make_link(spec: str, device: torch.device) -> Link:
    """Return the link that `spec` names.

    It is `auto` (CUDA streams on a GPU, a view on a CPU), `view`, or `emulated:RATE`, in GB/s.
    Raises TierForceError for any other, and as `refuse_on_gpu` does.
    """
    rate = emulated_rate(spec)
    if device.type == "cpu":
        return ViewLink(device) if rate is None else EmulatedLink(device, rate * 1e9)
    refuse_on_gpu(spec, device.type)
    from offload.cuda_link import CudaLink

    return CudaLink(device)
