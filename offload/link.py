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
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from offload.errors import TierForceError
from offload.host_memory import allocate, host_available, process_peak

Copy = tuple[Tensor, Tensor]  # destination, source: contiguous blocks of one size


def by_head(destination: Tensor, source: Tensor) -> list[Copy]:
    """Return the copies, each of one contiguous block, that take source (parts, H, T, D) there."""
    parts, count = source.shape[:2]
    heads = product(range(parts), range(count))
    return [(destination[part, head], source[part, head]) for part, head in heads]


class Link(ABC):
    """A way for copies, which run in the order they are asked for.

    A ticket stands for a copy; `wait` orders later compute after it.
    """

    # False where host memory is device memory: callers then work on the host store itself
    copies = True

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

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Let compute issued from here on see the copy finished."""

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


class EmulatedLink(Link):
    """A thread that copies between CPU buffers, in order, while the caller computes."""

    def __init__(self, device: torch.device, rate: float):
        """Start the thread; `rate` is in bytes a second."""
        if not rate > 0:
            raise TierForceError(
                f"an emulated link needs a rate above 0 GB/s, found {rate / 1e9:g}"
            )
        super().__init__(device)
        self.rate = rate
        self._jobs: queue.Queue[tuple[Sequence[Copy], threading.Event] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="emulated-link", daemon=True)
        self._thread.start()

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(numel, dtype)

    def copy(self, pairs: Sequence[Copy]) -> threading.Event:
        for destination, source in pairs:  # memmove would not notice
            if not (
                destination.is_contiguous()
                and source.is_contiguous()
                and destination.nbytes == source.nbytes
            ):
                raise ValueError("the link moves contiguous blocks of one size only")
        done = threading.Event()
        self._jobs.put((pairs, done))
        return done

    def wait(self, ticket: threading.Event) -> None:
        ticket.wait()

    def drain(self) -> None:
        # when Python ends, the thread does not run any more
        if self._thread.is_alive() and not sys.is_finalizing():
            self.copy(()).wait()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def device_available(self) -> int:
        return host_available()

    def _run(self) -> None:
        free_at = time.perf_counter()  # when the wire is next free
        while job := self._jobs.get():
            pairs, done = job
            free_at = max(free_at, time.perf_counter())
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
    Raises TierForceError for any other.
    """
    name, _, rate = spec.partition(":")
    if name == "auto" and not rate:
        if device.type != "cuda":
            return ViewLink(device)
        from offload.cuda_link import CudaLink

        return CudaLink(device)
    if device.type == "cpu" and spec == "view":
        return ViewLink(device)
    if device.type == "cpu" and name == "emulated":
        try:
            return EmulatedLink(device, float(rate) * 1e9)
        except ValueError:
            pass
    raise TierForceError(
        f"`link` {spec} is not a link for {device.type}: use auto, or on a CPU view or "
        "emulated:RATE (GB/s, as in emulated:0.5)"
    )
