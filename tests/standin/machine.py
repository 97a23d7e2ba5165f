"""The state of a stand-in GPU: its streams, its memory and what the host waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from standin.clocks import Block, Timeline, region_of

Use = tuple[Block, Any, bool]  # the block, the region in it, and whether it is written


class Allocation(Block):
    """Device memory, counted while anything uses it.

    When nothing does, it is due to be free of other streams' work.
    """

    def __init__(self, machine: Machine, nbytes: int, name: str):
        super().__init__(name)
        self.machine, self.nbytes, self.owner = machine, 0, machine.current
        # what allocated it, if a recording did
        self.capture = machine.capture and ref(machine.capture)
        machine.allocate(nbytes)  # which may refuse
        self.nbytes = nbytes

    def __del__(self) -> None:
        self.machine.free(self)


class Machine:
    """One GPU of this process.

    Work is done at once, in the order of launches; that it might be done later is what clocks tell.
    """

    def __init__(self, index: int, memory: int):
        self.index, self.memory, self.limit = index, memory, memory
        self.bus = index + 1  # of its PCI address
        self.device = torch.device("cuda", index)
        self.host = Timeline("the host")
        self.default = Timeline("the default stream")
        self.nccl = Timeline("NCCL's stream")
        self.streams = [self.default, self.nccl]
        self.current = self.default
        self.allocated = self.peak = 0
        self.pinned: dict[int, tuple[int, Block]] = {}  # by address: bytes, and who used them
        self.waits: list[str] = []  # what the host waited for the device for
        self.faults: list[str] = []  # what was wrong where nothing can be raised
        self.capture: Any = None  # the recording under way
        self.stuck = False  # a capture failed, and the allocator was not told that it is over
        self.chosen = 0  # the GPU that code means which names none
        self.pins = True  # whether the driver registers memory
        self.error: str | None = None  # of the driver, for the next kernel to report
        self.nccl_joined = False

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> None:
        if self.allocated + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes, {self.allocated} are in "
                "use."
            )
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def free(self, block: Allocation) -> None:
        self.allocated -= block.nbytes
        if block.capture is not None:
            return  # a graph's own memory goes back by itself
        # whoever gets the memory next launches after what these two know
        if at := block.pending(block.owner, self.host):
            self.faults.append(f"{block.name} was freed before {at} was known to be done")

    def register(self, address: int, nbytes: int) -> int:
        if not self.pins:
            self.error = "CUDA error: out of memory"
            return 2
        self.pinned[address] = (nbytes, Block("registered host memory"))
        return 0

    def unregister(self, address: int) -> None:
        _, block = self.pinned.pop(address)
        if at := block.pending(self.host):
            self.faults.append(f"host memory was given back before {at} was known to be done")

    def registered(self, x: Tensor) -> tuple[Block, Any] | None:
        """Return the block of registered memory that a CPU tensor lies in, and its region there."""
        for start, (nbytes, block) in self.pinned.items():
            if x.numel() and start <= x.data_ptr() < start + nbytes:
                return block, region_of(x, (x.data_ptr() - start) // x.itemsize)
        return None

    # -- order -------------------------------------------------------------------------------------

    def stream(self) -> Timeline:
        self.streams.append(Timeline(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def step(self, timeline: Timeline, what: str, accesses: Sequence[Use]) -> None:
        """Take the next step of a stream, or of the host, behind all that the host knows.

        Raises Race.
        """
        timeline.after(self.host.mark())
        timeline.steps += 1
        for block, region, write in accesses:
            block.touch(timeline, region, write, what)

    def here(self, device: Any) -> bool:
        """Tell whether a device is this GPU.

        Raises RuntimeError where it is another one: each rank has its own.
        """
        device = torch.device(device)
        if device.type != "cuda":
            return False
        if (self.chosen if device.index is None else device.index) != self.index:
            raise RuntimeError(f"{device} from a rank on {self.device}")
        return True

    def wait(self, timeline: Timeline, what: str) -> None:
        """Let the host wait for a stream."""
        self.refuse(what)
        self.waits.append(what)
        self.host.after(timeline.mark())

    def wait_for_all(self) -> None:
        for timeline in self.streams:
            self.wait(timeline, "synchronize")

    def empty_cache(self) -> None:
        if self.stuck:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def refuse(self, what: str) -> None:
        """Refuse what a stream that is being captured does not permit."""
        if self.capture is not None:
            self.capture.invalid = True
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )

    def run(self, what: str, accesses: Sequence[Use], work: Callable[[], Any]) -> Any:
        """Do work on the current stream, and return its result."""
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError(error)
        self.step(self.current, what, accesses)
        return work()
