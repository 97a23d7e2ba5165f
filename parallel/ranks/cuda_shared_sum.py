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
from offload.memory.cuda_link import register
from parallel.ranks.shared_memory import SharedMemory
from parallel.ranks.shared_sum import PIECE_BYTES, AsyncSum, Lane, SharedSum, add_in_order

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
_POLL_S = 1e-3
_CLOSE_S = 10.0  # seconds to wait for sums that are still in progress
_AFTER_WRITES = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream wrote before is visible first


_stuck: list[CudaSum] = []  # sums that do not end: streams use their memory


class StreamCounters:
    """Counters in registered host memory that streams set and wait for.

    Their methods raise RuntimeError, as torch's do, for an error of the driver.
    """

    def __init__(self, address: int):
        """Use the counters at an address. Raises TierForceError if the driver cannot."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._wait, self._write = driver.cuStreamWaitValue64_v2, driver.cuStreamWriteValue64_v2
            on_device = ctypes.c_uint64()
            code = driver.cuMemHostGetDevicePointer_v2(
                ctypes.byref(on_device), ctypes.c_void_p(address), 0
            )
        except (OSError, AttributeError) as error:
            raise TierForceError("the driver's streams cannot wait for host memory") from error
        if code:
            raise TierForceError(f"the GPU has no address of shared memory (error {code})")
        self._address = int(on_device.value)
        for call in (self._wait, self._write):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)

    def wait(self, stream: torch.cuda.Stream, counter: int, value: int) -> None:
        """Let later work of a stream wait until a counter has reached a value."""
        address = self._address + 8 * counter
        _check(self._wait(stream.cuda_stream, address, value, _GREATER_OR_EQUAL))

    def write(self, stream: torch.cuda.Stream, counter: int, value: int) -> None:
        """Set a counter after the stream's work so far."""
        address = self._address + 8 * counter
        _check(self._write(stream.cuda_stream, address, value, _AFTER_WRITES))


class CudaSum(SharedSum):
    """Sums on a GPU, on two streams of their own: one writes, one reads and adds."""

    def __init__(self, memory: SharedMemory, device: torch.device):
        """Raises TierForceError if the driver cannot pin the memory or wait for it."""
        super().__init__(memory)
        self._device = device
        staging = torch.empty(memory.size, PIECE_BYTES, dtype=torch.uint8, device=device)
        streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # tensors of sums that were not waited for: not to be freed while the streams use them
        self._unfinished: dict[int, Tensor] = {}
        if code := register(memory.buffer, device):
            raise TierForceError(
                f"the driver refused to pin shared memory (cudaHostRegister: error {code})"
            )
        try:
            counters = StreamCounters(memory.buffer.data_ptr())
        except TierForceError:
            self._unregister()
            raise
        self._out, self._into = (_StreamLane(counters, stream, staging) for stream in streams)

    def start(self, x: Tensor) -> AsyncSum:
        if self._into.stream.query():
            self._unfinished.clear()
        computed = torch.cuda.current_stream(self._device)
        self._out.stream.wait_stream(computed)
        self._into.stream.wait_stream(computed)
        number = self._pieces
        self._unfinished[number] = x
        self._exchange(x, self._out, self._into)
        done = self._into.stream.record_event()

        def finish() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(done)
            self._unfinished.pop(number, None)
            return x

        return finish

    def drain(self, seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while not self._into.stream.query() and time.monotonic() < ends_at:
            time.sleep(_POLL_S)
        return self._into.stream.query()

    def close(self) -> None:
        if self.drain(_CLOSE_S):
            self._unregister()
        else:
            _stuck.append(self)
        super().close()

    def _unregister(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.memory.buffer.data_ptr())


class _StreamLane(Lane):
    """A stream."""

    def __init__(self, counters: StreamCounters, stream: torch.cuda.Stream, staging: Tensor):
        """`staging` (ranks, bytes): device memory of a piece of each rank."""
        self._counters, self._staging = counters, staging
        self.stream = stream

    def wait(self, counter: int, value: int) -> None:
        if value > 0:
            self._counters.wait(self.stream, counter, value)

    def post(self, counter: int, value: int) -> None:
        self._counters.write(self.stream, counter, value)

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
    """Raise RuntimeError for an error code of the driver."""
    if code:
        raise RuntimeError(f"the driver's streams cannot wait for host memory (error {code})")
