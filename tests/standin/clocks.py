"""Happens-before order of streams, the host, and their accesses to shared memory.

Vector clocks track it, as in torch's CUDA sanitizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes and strides, in elements


class Race(AssertionError):
    """Two unordered accesses to the same memory, at least one of them a write."""


class Timeline:
    """The host, or a stream.

    Its steps are numbered; `known_steps` holds, for every other timeline, the number of its steps
    that are done before the next one here.
    """

    def __init__(self, name: str):
        self.name, self.steps = name, 0
        self.known_steps: dict[Timeline, int] = {}

    def mark(self) -> dict[Timeline, int]:
        """Return an event: the steps of all timelines that are done at this point of this one."""
        return {**self.known_steps, self: self.steps}

    def wait_for(self, mark: Mapping[Timeline, int]) -> None:
        for other, steps in mark.items():
            if other is not self:
                self.known_steps[other] = max(self.known_steps.get(other, 0), steps)

    def steps_known_of(self, other: Timeline) -> int:
        return self.steps if other is self else self.known_steps.get(other, 0)


@dataclass(frozen=True)
class Access:
    step: int
    write: bool
    region: Region
    what: str


class Block:
    """One allocation, on the device or in registered host memory."""

    def __init__(self, name: str):
        self.name = name
        self.accesses: dict[Timeline, list[Access]] = {}

    def record_access(self, timeline: Timeline, region: Region, write: bool, what: str) -> None:
        """Record an access in the timeline's latest step. Raises Race."""
        for other, accesses in self.accesses.items():
            if other is timeline:
                continue
            for access in reversed(accesses):
                if access.step <= timeline.steps_known_of(other):
                    break
                if (write or access.write) and overlap(access.region, region):
                    kinds = [
                        "writes" if is_write else "reads" for is_write in (write, access.write)
                    ]
                    raise Race(
                        f"{timeline.name}: {what} {kinds[0]} {self.name} that {other.name}: "
                        f"{access.what} {kinds[1]}"
                    )
        self.accesses.setdefault(timeline, []).append(Access(timeline.steps, write, region, what))

    def pending(self, *timelines: Timeline) -> str | None:
        """Return an access that is not known to be done on any of these timelines, or None."""
        for other, accesses in self.accesses.items():
            if all(accesses[-1].step > timeline.steps_known_of(other) for timeline in timelines):
                return f"{other.name}: {accesses[-1].what}"
        return None


def region_of(x: Tensor, offset: int | None = None) -> Region:
    return x.storage_offset() if offset is None else offset, tuple(x.shape), tuple(x.stride())


def overlap(one: Region, other: Region) -> bool:
    """Return whether two regions share an element."""
    (first, last), (low, high) = _ends(one), _ends(other)
    if last < low or high < first or 0 in one[1] or 0 in other[1]:
        return False
    start, count = min(first, low), max(last, high) - min(first, low) + 1
    touched = torch.zeros(count, dtype=torch.bool)
    touched.as_strided(one[1], one[2], one[0] - start).fill_(True)
    return bool(touched.as_strided(other[1], other[2], other[0] - start).any())


def _ends(region: Region) -> tuple[int, int]:
    offset, sizes, strides = region
    return offset, offset + sum(
        (size - 1) * stride for size, stride in zip(sizes, strides, strict=True)
    )
