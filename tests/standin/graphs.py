"""Captured graphs like CUDA's: launches by address, with the host's numbers baked in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from standin.clocks import Timeline
from standin.machine import Machine, Use
from standin.tensors import poison, tensors_in


@dataclass
class Node:
    """One launch. It does not keep memory alive that was allocated before the capture."""

    what: str
    uses: list[
        tuple[Callable[[], Any], Any, bool]
    ]  # weak references to blocks, regions, and whether they are written
    own: list[bool]  # whether a block was allocated in this capture: its memory stays valid
    work: Callable[[], Any]
    out: list[Tensor]  # output buffers; empty if the work writes to its arguments

    def memory(self) -> list[Use]:
        """Return the memory it accesses. Raises RuntimeError if that was freed."""
        blocks = [block() for block, _, _ in self.uses]
        if any(block is None and not own for block, own in zip(blocks, self.own, strict=True)):
            raise RuntimeError(f"{self.what}: a replay accesses memory that was freed")
        return [
            (block, *where)
            for block, (_, *where) in zip(blocks, self.uses, strict=True)
            if block is not None
        ]


class Graph:
    """`torch.cuda.CUDAGraph`, in host memory.

    Nothing is computed during capture: results hold no numbers, and arguments are unchanged. A
    replay runs on one stream, collectives included: missing order between the streams of a capture
    is not detected.
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.nodes: list[Node] = []
        self.invalid = False
        self.is_reset = False
        machine.graphs.add(self)

    def add(
        self,
        what: str,
        accesses: Sequence[Use],
        kernel: Callable[..., Any],
        args: Any,
        kwargs: Any,
        in_place: bool,
    ) -> Any:
        if kwargs.get("generator") is not None:
            self.invalid = True
            raise RuntimeError(f"{what}: a generator that is not registered with the graph")
        out = None if in_place else kernel(*args, **kwargs)  # run for the shape of its result
        poison(out, integer=0)
        uses = [(ref(block), region, write) for block, region, write in accesses]
        captures = [getattr(block, "capture", None) for block, _, _ in accesses]
        own = [capture is not None and capture() is self for capture in captures]
        self.nodes.append(Node(what, uses, own, lambda: kernel(*args, **kwargs), tensors_in(out)))
        return args[0] if in_place and args else out

    def end(self) -> None:
        self.machine.capture = None
        if self.invalid:
            self.machine.is_stuck = True  # before torch 2.13
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    def reset(self) -> None:
        self.nodes.clear()
        self.is_reset = True

    def replay(self) -> None:
        assert not self.invalid
        assert not self.is_reset
        self.machine.check_not_capturing("replay")
        launches = len(self.machine.launches)
        with _disable_current_modes():
            for node in self.nodes:
                results = self.machine.run(node.what, node.memory(), node.work)
                for out, value in zip(
                    node.out, tensors_in(results) if node.out else (), strict=True
                ):
                    out.copy_(value)
        self.machine.launches[launches:] = ["replay"]


class Capture(AbstractContextManager[None]):
    """`torch.cuda.graph`."""

    def __init__(self, graph: Graph, stream: Timeline):
        self.graph, self.stream = graph, stream

    def __enter__(self) -> None:
        machine = self.graph.machine
        machine.wait_for_all()
        machine.empty_cache()
        self.previous, machine.current = machine.current, self.stream
        machine.capture = self.graph

    def __exit__(self, *error: object) -> None:
        self.graph.end()  # raises before the stream is restored, like torch's
        self.graph.machine.current = self.previous


def graph_type(machine: Machine) -> type[Graph]:
    """Return a replacement for `torch.cuda.CUDAGraph`: a type, for annotations may name it."""

    class CUDAGraph(Graph):
        def __init__(self) -> None:
            super().__init__(machine)

    return CUDAGraph


def capture_type(machine: Machine) -> Callable[..., Capture]:
    pools: dict[Any, WeakSet[Graph]] = {}

    def capture(
        graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Capture:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(capture_error_mode)
        if pool in pools and not pools[pool]:
            # the pool was freed with its last graph
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        pools.setdefault(pool, WeakSet()).add(graph)
        return Capture(graph, stream.timeline if stream is not None else machine.stream())

    return capture
