"""The link between pinned host memory and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from offload.errors import FitError
from offload.host_memory import allocate
from offload.link import Copy, Link
from offload.numa import gpu_node, on_node


class CudaLink(Link):
    """PCIe: registered host memory, one copy stream, events; no device-wide synchronisation."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._registered: dict[int, Tensor] = {}  # by address

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = allocate(numel, dtype)
        with on_node(gpu_node(self.device)):  # pinning is the first to touch the pages
            # pin_memory would round the allocation up to a power of two
            code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code:
            with suppress(RuntimeError):
                # or the next kernel anywhere would report this failure as its own
                torch.ones(1, device=self.device).add_(1)
            raise FitError(
                f"the driver refused to pin {buffer.nbytes / 1e9:.1f} GB of host memory "
                f"(cudaHostRegister: error {code}). Raise the limit on locked memory (ulimit -l "
                "unlimited), or use a shorter `context`."
            )
        self._registered[buffer.data_ptr()] = buffer
        return buffer

    def release(self, buffer: Tensor) -> None:
        self.drain()
        if self._registered.pop(buffer.data_ptr(), None) is not None:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def copy(self, pairs: Sequence[Copy]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        for buffer in list(self._registered.values()):
            self.release(buffer)

    def device_available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak
