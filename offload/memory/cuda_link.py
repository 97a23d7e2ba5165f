"""The link between pinned host memory and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from offload.errors import InsufficientMemoryError
from offload.memory.host import allocate, exclude_from_forks, prefault
from offload.memory.link import Copy, Link, copies_by_head
from offload.memory.numa import gpu_node, on_node


class CudaLink(Link):
    """PCIe: registered host memory, events, a copy stream, and one for copies out to the host.

    There is no device-wide synchronisation.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.device_name = torch.cuda.get_device_name(device)
        self._stream = torch.cuda.Stream(device)
        self._out_stream = torch.cuda.Stream(device)
        self._read_stream = torch.cuda.Stream(device)
        self._registered: dict[int, Tensor] = {}  # keyed by address

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = allocate(numel, dtype)
        with on_node(gpu_node(self.device)):
            prefault(buffer)
            # pin_memory would round the allocation up to a power of two
            code = register(buffer, self.device)
        if code:
            raise InsufficientMemoryError(
                f"the driver refused to pin {buffer.nbytes / 1e9:.1f} GB of host memory "
                f"(cudaHostRegister: error {code}). Raise the limit on locked memory (ulimit -l "
                "unlimited), or use a shorter `context`."
            )
        exclude_from_forks(buffer, True)
        self._registered[buffer.data_ptr()] = buffer
        return buffer

    def release(self, buffer: Tensor) -> None:
        self.drain()
        if self._registered.pop(buffer.data_ptr(), None) is not None:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            exclude_from_forks(buffer, False)

    def copy(self, pairs: Sequence[Copy]) -> torch.cuda.Event:
        return self._start(self._stream, pairs)

    def copy_out(self, pairs: Sequence[Copy]) -> torch.cuda.Event:
        return self._start(self._out_stream, pairs)

    def finish_compute(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def read_to_host(self, kv: Tensor) -> Tensor:
        copy = torch.empty(kv.shape, dtype=kv.dtype)
        torch.cuda.set_device(self.device)  # the calling thread may have none yet
        with torch.cuda.stream(self._read_stream):
            for destination, source in copies_by_head(copy, kv):
                destination.copy_(source)
        return copy

    def read_later(self, x: Tensor) -> Callable[[], Tensor]:
        copy = x.to("cpu", non_blocking=True)  # torch pins the memory of such a copy
        arrival = torch.cuda.current_stream(self.device).record_event()

        def wait() -> Tensor:
            arrival.synchronize()
            return copy

        return wait

    def _start(self, stream: torch.cuda.Stream, pairs: Sequence[Copy]) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def is_complete(self, ticket: torch.cuda.Event) -> bool:
        return ticket.query()

    def drain(self) -> None:
        self._stream.synchronize()
        self._out_stream.synchronize()

    def close(self) -> None:
        for buffer in list(self._registered.values()):
            self.release(buffer)

    def device_available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def register(buffer: Tensor, device: torch.device) -> int:
    """Pin a host buffer where it is; return the driver's error code, or 0."""
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        with suppress(RuntimeError):
            # clears the error, which the next kernel launch would report otherwise
            torch.ones(1, device=device).add_(1)
    return code
