"""What happens before what: streams, the host, and the memory they share.

It is told by vector clocks, as in torch's CUDA sanitizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes and strides, in elements


class Race(AssertionError):
    """Two accesses to the same memory, one of them a write, that nothing puts in an order."""


class Timeline:
    """The host, or a stream.

    Its steps are numbered; `seen` says how many steps of each other one are done before its next.
    """

    def __init__(self, name: str):
        self.name, self.steps = name, 0
        self.seen: dict[Timeline, int] = {}

    def mark(self) -> dict[Timeline, int]:
        """Return all that is done once this timeline has come to here."""
        return {**self.seen, self: self.steps}

    def after(self, mark: Mapping[Timeline, int]) -> None:
        for other, steps in mark.items():
            if other is not self:
                self.seen[other] = max(self.seen.get(other, 0), steps)

    def knows(self, other: Timeline) -> int:
        return self.steps if other is self else self.seen.get(other, 0)


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

    def touch(self, timeline: Timeline, region: Region, write: bool, what: str) -> None:
        """Note an access in the timeline's latest step. Raises Race."""
        for other, accesses in self.accesses.items():
            if other is timeline:
                continue
            for access in reversed(accesses):
                if access.step <= timeline.knows(other):
                    break
                if (write or access.write) and overlap(access.region, region):
                    kinds = tuple("writes" if each else "reads" for each in (write, access.write))
                    raise Race(
                        f"{timeline.name}: {what} {kinds[0]} {self.name} that {other.name}: "
                        f"{access.what} {kinds[1]}"
                    )
        self.accesses.setdefault(timeline, []).append(Access(timeline.steps, write, region, what))

    def pending(self, *timelines: Timeline) -> str | None:
        """Return an access that none of these timelines knows to be done, or None."""
        for other, accesses in self.accesses.items():
            if all(accesses[-1].step > timeline.knows(other) for timeline in timelines):
                return f"{other.name}: {accesses[-1].what}"
        return None


def region_of(x: Tensor, offset: int | None = None) -> Region:
    return x.storage_offset() if offset is None else offset, tuple(x.shape), tuple(x.stride())


def overlap(one: Region, other: Region) -> bool:
    """Tell whether two regions share an element."""
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
