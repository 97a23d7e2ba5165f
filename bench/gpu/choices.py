"""Shared by the parts of a GPU day: the options, the device, and the reporting of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from bench.harness.experiment import Row
from parallel.execution.cuda_graphs import cuda_graphs_supported
from parallel.ranks.process_group import TensorParallelGroup


def row(part: str, what: str, value: float | str | None, unit: str = "") -> Row:
    """Return a row of the table; a value of None is unknown."""
    shown = "unknown" if value is None else value
    return {"part": part, "what": what, "value": shown, "unit": unit}


@dataclass(frozen=True)
class Choices:
    """The options of `python -m bench gpu`; None means the default of each part."""

    target: str = "8b"
    draft: str | None = None
    rope: str | None = None
    context: int | None = None
    device: str = "auto"
    device_memory: float = 24.0
    retrieval_budget: int = 4096
    gpu_kv_layers: int | None = None
    link: str = "auto"
    mode: str = "hierarchical"
    int8: bool | None = None
    graphs: bool | None = None
    rehearse: bool = False


@dataclass
class Context:
    """State shared by the parts that run in one process."""

    choices: Choices
    report: Callable[[Row], None]
    part: str = ""
    # milliseconds of forwards with all KV on the device, by their names in bench.speed.forwards
    compute: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, value: float | str | None, unit: str = "") -> None:
        """Report a value of the current part; None is unknown."""
        self.report(row(self.part, what, value, unit))

    @cached_property
    def group(self) -> TensorParallelGroup:
        """Return a group of this process alone."""
        return TensorParallelGroup.from_environment(self.choices.device)

    @property
    def device(self) -> torch.device:
        """Return the device that is measured."""
        return self.group.device

    @cached_property
    def graphs(self) -> bool:
        """Return whether short forwards are captured as CUDA graphs."""
        return (
            cuda_graphs_supported(self.group)
            if self.choices.graphs is None
            else self.choices.graphs
        )

    @property
    def is_small(self) -> bool:
        """Return whether to measure small sizes: in a rehearsal, and on a CPU."""
        return self.choices.rehearse or self.device.type == "cpu"

    def tokens(self, default: int) -> int:
        """Return the tokens of a prompt: the `context` option, or the default of the part."""
        if self.choices.context is not None:
            return self.choices.context
        return 1024 if self.is_small else default
