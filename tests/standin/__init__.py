"""A stand-in for a GPU: this project's CUDA code, run on a CPU with real numbers.

`standin()` makes torch report GPUs. Tensors on them have their own type, which computes in host
memory what a GPU would, and rejects what a GPU rejects: tensors of two devices in one operation,
kernels that only CPUs have, host waits while a graph is captured. Streams are vector clocks:
unordered accesses to the same memory are a Race, memory that is freed while another stream may use
it is a fault. Captured graphs bake in what CUDA graphs bake in. Fresh memory holds NaN.

It cannot check anything about time, CUDA's own kernels and their rounding, NCCL, the driver, or
memory fragmentation.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from offload.attention import folding
from offload.kernels import batch_invariant_attention, selection
from offload.recurrent import selection as recurrent_selection
from parallel.ranks import cuda_shared_sum
from parallel.weights import selection as weight_selection
from standin.clocks import Race, Timeline
from standin.dispatch import OnGpu
from standin.graphs import capture_type, graph_type
from standin.machine import Machine

# functions that test fused kernels, and those that select them
SELF_TESTS: dict[ModuleType, dict[str, Any]] = {
    folding: {"_test_merge": folding.merge_kernels},
    selection: {
        "_test_split": selection.split_kernels,
        "_test_batch_invariant": selection.batch_invariant_kernels,
        "_test_retrieval": selection.retrieval_kernels,
        "_test_slots": selection.slot_kernels,
    },
    recurrent_selection: {"_test_prompts": recurrent_selection.prompt_kernels},
    weight_selection: {"_test_planes": weight_selection.plane_kernels},
}
_CUDA, _META = 1, 14  # torch/headeronly/core/DeviceType.h
__all__ = ["Machine", "Race", "gpu_or_standin", "standin"]


class Event:
    """`torch.cuda.Event`, recorded on a stream."""

    def __init__(self, machine: Machine, timeline: Timeline):
        self.machine, self.timeline, self.mark = machine, timeline, timeline.mark()

    def query(self) -> bool:
        self.machine.learn(self.mark)
        return True

    def synchronize(self) -> None:
        """Wait; it counts if the stream has had no work since, and so runs out of it."""
        machine, what = self.machine, "Event.synchronize"
        machine.check_not_capturing(what)
        if self.timeline.steps == self.mark[self.timeline]:
            machine.waits.append(what)
        machine.learn(self.mark)


class Stream:
    """`torch.cuda.Stream`."""

    machine: Machine

    def __init__(self, device: Any = None, priority: int = 0, timeline: Timeline | None = None):
        self.timeline = timeline or self.machine.stream()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.timeline is self.timeline

    def wait_stream(self, other: Stream) -> None:
        self.timeline.wait_for(other.timeline.mark())

    def wait_event(self, event: Event) -> None:
        self.timeline.wait_for(event.mark)

    def record_event(self) -> Event:
        return Event(self.machine, self.timeline)

    def query(self) -> bool:
        self.machine.learn(self.timeline.mark())
        return True

    def synchronize(self) -> None:
        self.machine.wait(self.timeline, "Stream.synchronize")


class StreamCounters:
    """The driver's stream memory operations: work is done at once, so a stream's wait blocks."""

    def __init__(self, address: int):
        self.address = address

    def wait(self, stream: Stream, counter: int, value: int) -> None:
        while self._number(counter).value < value:
            time.sleep(1e-4)

    def write(self, stream: Stream, counter: int, value: int) -> None:
        self._number(counter).value = value

    def _number(self, counter: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.address + 8 * counter)


class Work:
    """A collective in flight on NCCL's stream."""

    def __init__(self, work: Any, machine: Machine):
        self.work, self.machine, self.mark = work, machine, machine.nccl.mark()

    def wait(self) -> None:
        self.work.wait()
        self.machine.current.wait_for(self.mark)


def _generator(real: Any) -> Any:
    class Generator(real):
        """Draws on the host, and reports the requested device as its own."""

        def __new__(cls, device: Any = "cpu") -> Generator:
            generator = super().__new__(cls, "cpu")
            generator.reported_device = torch.device(device)
            return generator

        @property
        def device(self) -> torch.device:
            return self.reported_device

    return Generator


def _install_device_guard() -> None:
    """Let torch's C++ switch to a GPU and back.

    It looks up a table in which a CPU build has no entry for CUDA: install the meta device's.
    """
    torch._C._ensureCUDADeviceGuardSet()  # sufficient in a CUDA build that finds no GPU
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[_CUDA] = guards[_CUDA] or guards[_META]


def _patches(machine: Machine, gpus: int) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes of torch to replace: owner, name and new value."""
    stream_type, handles = type("Stream", (Stream,), {"machine": machine}), count(1)

    @contextmanager
    def use_stream(stream: Stream) -> Iterator[None]:
        previous, machine.current = machine.current, stream.timeline
        try:
            yield
        finally:
            machine.current = previous

    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "set_device": lambda device: setattr(machine, "current_index", torch.device(device).index),
        "get_device_name": lambda device=None: "a stand-in",
        "get_device_properties": lambda device: SimpleNamespace(
            total_memory=machine.memory,
            multi_processor_count=128,
            pci_domain_id=0,
            pci_bus_id=machine.bus,
            pci_device_id=0,
        ),
        "Stream": stream_type,
        "stream": use_stream,
        "current_stream": lambda device=None: stream_type(timeline=machine.current),
        "set_stream": lambda stream: setattr(machine, "current", stream.timeline),
        "CUDAGraph": graph_type(machine),
        "graph": capture_type(machine),
        "graph_pool_handle": lambda: (0, next(handles)),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: machine.register(address, nbytes),
            cudaHostUnregister=machine.unregister,
        ),
        "mem_get_info": lambda device=None: (
            machine.limit - machine.allocated - machine.driver_bytes,
            machine.memory,
        ),
        "memory_reserved": lambda device=None: machine.allocated,
        "memory_allocated": lambda device=None: machine.allocated,
        "max_memory_allocated": lambda device=None: machine.peak,
        "reset_peak_memory_stats": lambda device=None: setattr(machine, "peak", machine.allocated),
        "set_per_process_memory_fraction": lambda share, device=None: setattr(
            machine, "limit", int(share * machine.memory)
        ),
        "empty_cache": machine.empty_cache,
    }
    for name, value in cuda.items():
        yield torch.cuda, name, value
    yield torch, "Generator", _generator(torch.Generator)
    yield (
        torch._C,
        "_cuda_endAllocateToPool",
        lambda device, pool: setattr(machine, "is_stuck", False),
    )
    yield dist, "init_process_group", _init_process_group(dist.init_process_group, machine)
    yield (
        dist,
        "get_backend_config",
        lambda group=None: "cpu:gloo,cuda:nccl" if machine.uses_nccl else "cpu:gloo,cuda:gloo",
    )
    yield cuda_shared_sum, "StreamCounters", StreamCounters
    yield dist, "all_reduce", _all_reduce(dist.all_reduce, machine)


def _init_process_group(real: Any, machine: Machine) -> Callable[..., None]:
    def init(backend: str, **options: Any) -> None:
        machine.uses_nccl = "nccl" in backend
        real("gloo", **options)

    return init


def _all_reduce(real: Any, machine: Machine) -> Callable[..., Any]:
    def all_reduce(x: Any, async_op: bool = False) -> Any:
        work = real(x, async_op=async_op)
        return Work(work, machine) if async_op else None

    return all_reduce


def _fail_self_test(*_: Any) -> None:
    raise RuntimeError("a stand-in compiles nothing")


@contextmanager
def standin(gpus: int = 1, index: int = 0, memory: int = 24 << 30) -> Iterator[Machine]:
    """Simulate GPU `index` of this process, with `memory` bytes.

    On exit, faults are raised as a Race.
    """
    _install_device_guard()
    machine = Machine(index, memory)
    gc.freeze()  # existing objects hold no memory of this GPU: the collector skips them
    with ExitStack() as stack:
        for owner, name, value in _patches(machine, gpus):
            stack.enter_context(patch.object(owner, name, value))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        # torch.tensor creates its result on the host, and copies it like any other tensor.
        torch._C._set_only_lift_cpu_tensors(True)
        for module, names in SELF_TESTS.items():
            for name in names:
                stack.enter_context(patch.object(module, name, _fail_self_test))
        for masks in (
            batch_invariant_attention._causal_mask,
            batch_invariant_attention._window_mask,
        ):
            stack.callback(masks.cache_clear)  # they are in this GPU's memory
        stack.enter_context(OnGpu(machine))
        yield machine
    gc.collect()
    gc.unfreeze()
    if machine.faults:
        raise Race("; ".join(machine.faults[:5]))


@contextmanager
def gpu_or_standin() -> Iterator[Machine | None]:
    """Use the GPUs of this machine if it has any; else one of two stand-ins.

    A rank gets the stand-in with its local rank's index.
    """
    if torch.cuda.is_available():
        yield None
        return
    with standin(2, int(os.environ.get("LOCAL_RANK", 0))) as machine:
        yield machine
