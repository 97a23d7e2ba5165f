"""Recordings, as CUDA graphs: what was launched, by address, with every number of the host's baked in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from standin.clocks import Timeline
from standin.machine import Access, Machine
from standin.tensors import poison, tensors_in


@dataclass
class Node:
    what: str
    accesses: Sequence[Access]
    work: Callable[[], Any]
    out: list[Tensor]  # where the results go; none where the work writes to its arguments


class Graph:
    """`torch.cuda.CUDAGraph`. While it records nothing is computed: results hold no numbers, and arguments stay as they were."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.nodes: list[Node] = []
        self.invalid = False

    def add(self, what: str, accesses: Sequence[Access], kernel: Callable[..., Any], args: Any, kwargs: Any, in_place: bool) -> Any:
        if kwargs.get("generator") is not None:
            self.invalid = True
            raise RuntimeError(f"{what}: a generator that is not registered with the graph")
        if in_place:
            self.nodes.append(Node(what, accesses, lambda: kernel(*args, **kwargs), []))
            return args[0] if args else None
        out = kernel(*args, **kwargs)  # for its shape
        poison(out)
        self.nodes.append(Node(what, accesses, lambda: kernel(*args, **kwargs), list(tensors_in(out))))
        return out

    def end(self) -> None:
        self.machine.capture = None
        if self.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        assert not self.invalid
        self.machine.refuse("replay")
        with _disable_current_modes():
            for node in self.nodes:
                found = self.machine.run(node.what, node.accesses, node.work)
                for out, value in zip(node.out, tensors_in(found) if node.out else (), strict=True):
                    out.copy_(value)


class Capture(AbstractContextManager[None]):
    """`torch.cuda.graph`."""

    def __init__(self, graph: Graph, stream: Timeline):
        self.graph, self.stream = graph, stream

    def __enter__(self) -> None:
        machine = self.graph.machine
        machine.wait_for_all()
        self.before, machine.current = machine.current, self.stream
        machine.capture = self.graph

    def __exit__(self, *error: object) -> None:
        self.graph.end()  # which raises before the stream is put back, as torch's does
        self.graph.machine.current = self.before


def graph_type(machine: Machine) -> Callable[[], Graph]:
    return lambda: Graph(machine)


def capture_type(machine: Machine) -> Callable[..., Capture]:
    def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Capture:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(capture_error_mode)
        return Capture(graph, stream.timeline if stream is not None else machine.stream())

    return capture
