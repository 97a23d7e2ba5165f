"""The state of a stand-in GPU: its streams, its memory, and the host's waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from standin.clocks import Block, Timeline, region_of

MODULE_BYTES = 1 << 12  # a kernel's code, loaded with its first launch
NODE_BYTES = 1 << 16  # a launch in a graph

Use = tuple[Block, Any, bool]  # a block, the region in it, and whether it is written


class Allocation(Block):
    """Device memory, counted while anything refers to it.

    When it is freed, no other stream may have pending work on it.
    """

    def __init__(self, machine: Machine, nbytes: int, name: str):
        super().__init__(name)
        self.machine, self.nbytes, self.owner = machine, 0, machine.current
        # the capture that allocated it, or None
        self.capture = machine.capture and ref(machine.capture)
        machine.allocate(nbytes)  # may raise OutOfMemoryError
        self.nbytes = nbytes

    def __del__(self) -> None:
        self.machine.free(self)


class Machine:
    """One GPU of this process.

    Work is done immediately, in launch order; clocks track that it might be done later.
    """

    def __init__(self, index: int, memory: int):
        self.index, self.memory, self.limit = index, memory, memory
        self.bus = index + 1  # bus number in its PCI address
        self.device = torch.device("cuda", index)
        self.host = Timeline("the host")
        self.default = Timeline("the default stream")
        self.nccl = Timeline("NCCL's stream")
        self.streams = [self.default, self.nccl]
        self.current = self.default
        self.allocated = self.peak = 0
        self.modules: set[str] = set()  # kernels that were launched
        self.graphs: WeakSet[Any] = WeakSet()
        self.pinned: dict[int, tuple[int, Block]] = {}  # address: bytes, and their accesses
        self.waits: list[str] = []  # operations for which the host waited for the device
        # copies to the host: their stream and its step, the numbers, and the memory they appear in
        self.arrivals: list[tuple[Timeline, int, Tensor, Tensor]] = []
        self.launches: list[str] = []  # kernels, copies and replays of graphs
        self.faults: list[str] = []  # errors found where no exception can be raised
        self.capture: Any = None  # the graph being captured
        self.is_stuck = False  # a capture failed, and is still open in the allocator
        self.current_index = 0  # index of "cuda" without an index
        self.pins = True  # whether the driver can register memory
        self.error: str | None = None  # a driver error that the next kernel reports
        self.uses_nccl = False

    # -- memory ------------------------------------------------------------------------------------

    @property
    def driver_bytes(self) -> int:
        """Bytes that torch did not allocate: modules, and launches of graphs."""
        nodes = sum(len(graph.nodes) for graph in self.graphs)
        return len(self.modules) * MODULE_BYTES + nodes * NODE_BYTES

    def allocate(self, nbytes: int) -> None:
        if self.allocated + self.driver_bytes + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes, {self.allocated} are in "
                "use."
            )
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def free(self, block: Allocation) -> None:
        self.allocated -= block.nbytes
        if block.capture is not None:
            return  # a graph's own memory is freed with its pool
        # the next owner of the memory launches after the work known to these two
        if access := block.pending(block.owner, self.host):
            self.faults.append(f"{block.name} was freed before {access} was known to be done")

    def register(self, address: int, nbytes: int) -> int:
        if not self.pins:
            self.error = "CUDA error: out of memory"
            return 2
        self.pinned[address] = (nbytes, Block("registered host memory"))
        return 0

    def unregister(self, address: int) -> None:
        _, block = self.pinned.pop(address)
        if access := block.pending(self.host):
            self.faults.append(f"host memory was released before {access} was known to be done")

    def find_registered(self, x: Tensor) -> tuple[Block, Any] | None:
        """Return the block of registered memory of a CPU tensor, and its region there, or None."""
        for start, (nbytes, block) in self.pinned.items():
            if x.numel() and start <= x.data_ptr() < start + nbytes:
                return block, region_of(x, (x.data_ptr() - start) // x.itemsize)
        return None

    # -- order -------------------------------------------------------------------------------------

    def stream(self) -> Timeline:
        self.streams.append(Timeline(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def step(self, timeline: Timeline, what: str, accesses: Sequence[Use]) -> None:
        """Begin the next step of a stream, or of the host, after all work known to the host.

        Raises Race.
        """
        timeline.wait_for(self.host.mark())
        timeline.steps += 1
        for block, region, write in accesses:
            block.record_access(timeline, region, write, what)

    def is_this_gpu(self, device: Any) -> bool:
        """Return whether a device is this GPU.

        Raises RuntimeError if it is another GPU: each rank has its own.
        """
        device = torch.device(device)
        if device.type != "cuda":
            return False
        if (self.current_index if device.index is None else device.index) != self.index:
            raise RuntimeError(f"{device} is used by a rank on {self.device}")
        return True

    def wait(self, timeline: Timeline, what: str) -> None:
        """Make the host wait for a stream."""
        self.check_not_capturing(what)
        self.waits.append(what)
        self.learn(timeline.mark())

    def learn(self, mark: dict[Timeline, int]) -> None:
        """Let the host know that these steps are done."""
        self.host.wait_for(mark)
        waiting = []
        for arrival in self.arrivals:
            timeline, step, value, memory = arrival
            if step <= self.host.steps_known_of(timeline):
                with torch.inference_mode():  # it may be an inference tensor
                    memory.copy_(value)
            else:
                waiting.append(arrival)
        self.arrivals = waiting

    def wait_for_all(self) -> None:
        for timeline in self.streams:
            self.wait(timeline, "synchronize")

    def empty_cache(self) -> None:
        if self.is_stuck:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def check_not_capturing(self, what: str) -> None:
        """Invalidate a capture by an operation that it does not permit. Raises RuntimeError."""
        if self.capture is not None:
            self.capture.invalid = True
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )

    def run(self, what: str, accesses: Sequence[Use], work: Callable[[], Any]) -> Any:
        """Run work on the current stream, and return its result."""
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError(error)
        self.launches.append(what)
        self.modules.add(what)
        self.step(self.current, what, accesses)
        return work()
