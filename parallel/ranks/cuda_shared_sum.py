"""Sums through shared host memory on GPUs: copy engines, and counters that streams wait for.

The driver's stream memory operations (CUDA driver API, section 6.37) let a stream wait until a
number in host memory has been reached, whichever process or GPU writes it, without the host. The
ranks enqueue the same sums in the same order: each wait is for work that its rank enqueues before
anything that could wait for this one's later work, so they cannot wait for each other in a circle,
even where streams share a hardware queue.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.errors import TierForceError
from offload.memory.host import prefault
from offload.memory.numa import gpu_node, on_node
from parallel.ranks.shared_memory import SharedMemory
from parallel.ranks.shared_sum import PIECE_BYTES, AsyncSum, Lane, SharedSum, add_in_order

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
_POLL_S = 1e-3
_AFTER_WRITES = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream wrote before is visible first


class StreamCounters:
    """Counters in registered host memory that streams set and wait for."""

    def __init__(self) -> None:
        """Raises TierForceError if the driver has no such operations."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._wait, self._write = driver.cuStreamWaitValue64_v2, driver.cuStreamWriteValue64_v2
        except (OSError, AttributeError) as error:
            raise TierForceError("the driver's streams cannot wait for host memory") from error
        for call in (self._wait, self._write):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Let later work of a stream wait until the number at an address has reached a value."""
        _check(self._wait(stream.cuda_stream, address, value, _GREATER_OR_EQUAL))

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Write a number to an address, after the stream's work so far."""
        _check(self._write(stream.cuda_stream, address, value, _AFTER_WRITES))


class CudaSum(SharedSum):
    """Sums on a GPU, on two streams of their own: one writes, one reads and adds."""

    def __init__(self, memory: SharedMemory, device: torch.device):
        """Raises TierForceError if the driver cannot pin the memory or wait for it."""
        super().__init__(memory)
        self._device = device
        counters = StreamCounters()
        staging = torch.empty(memory.size, PIECE_BYTES, dtype=torch.uint8, device=device)
        self._out = _StreamLane(memory, counters, torch.cuda.Stream(device), staging)
        self._into = _StreamLane(memory, counters, torch.cuda.Stream(device), staging)
        with on_node(gpu_node(device)):
            for slot in self._slots[memory.rank]:
                prefault(slot)
        buffer = memory.buffer
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code:
            raise TierForceError(
                f"the driver refused to pin shared memory (cudaHostRegister: error {code})"
            )

    def start(self, x: Tensor) -> AsyncSum:
        computed = torch.cuda.current_stream(self._device)
        self._out.stream.wait_stream(computed)
        self._into.stream.wait_stream(computed)
        self._exchange(x, self._out, self._into)
        done = self._into.stream.record_event()

        def finish() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(done)
            return x

        return finish

    def drain(self, seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while not self._into.stream.query() and time.monotonic() < ends_at:
            time.sleep(_POLL_S)
        return self._into.stream.query()

    def close(self) -> None:
        self._out.stream.synchronize()
        self._into.stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.memory.buffer.data_ptr())
        super().close()


class _StreamLane(Lane):
    """A stream."""

    def __init__(
        self,
        memory: SharedMemory,
        counters: StreamCounters,
        stream: torch.cuda.Stream,
        staging: Tensor,
    ):
        """`staging` (ranks, bytes): device memory of a piece of each rank."""
        self._memory, self._counters, self._staging = memory, counters, staging
        self.stream = stream

    def wait(self, counter: int, value: int) -> None:
        if value > 0:
            self._counters.wait(self.stream, self._memory.address(counter), value)

    def post(self, counter: int, value: int) -> None:
        self._counters.write(self.stream, self._memory.address(counter), value)

    def follow(self, lane: Lane) -> None:
        assert isinstance(lane, _StreamLane)
        self.stream.wait_event(lane.stream.record_event())

    def write(self, slot: Tensor, piece: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            slot.copy_(piece, non_blocking=True)

    def read(self, slot: Tensor, rank: int) -> Tensor:
        staged = self._staging[rank][: slot.nbytes].view(slot.dtype)
        with torch.cuda.stream(self.stream):
            return staged.copy_(slot, non_blocking=True)

    def add(self, parts: Sequence[Tensor], out: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            add_in_order(parts, out)


def _check(code: int) -> None:
    """Raise TierForceError for an error code of the driver."""
    if code:
        raise TierForceError(f"the driver's streams cannot wait for host memory (error {code})")
