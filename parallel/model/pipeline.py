"""Layer-major prefill in steps, and its pipeline: chunks compute while older ones are all-reduced.

Between two steps, other sequences may run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

from torch import Tensor

from offload.attention.shape_buckets import ROWS
from offload.layout import ceil_div, shares
from parallel.ranks.process_group import AsyncSum

T = TypeVar("T")
Progress = Callable[[int, int], None]  # units of work done, and in total


class PrefillStep(NamedTuple):
    """The progress of a prefill after one of its steps."""

    done: int  # units of work
    total: int
    ends_layer: bool  # whether it was the last step of a layer


PrefillSteps = Generator[PrefillStep, None, Tensor]  # returns the logits (1, V)
# a decoding forward: yields each layer before it runs, and returns a T
LayerSteps = Generator[int, None, T]


def finish(steps: Generator[object, None, T]) -> T:
    """Run all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def part_of_prefill(steps: PrefillSteps, done: int, part: int, tokens: int) -> PrefillSteps:
    """Prefill `part` of `tokens` tokens, after `done` of them; the progress is that of all."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits
        units = done * step.total + part * step.done
        yield PrefillStep(units, tokens * step.total, step.ends_layer)


class Chunk:
    """A chunk of a prompt inside a layer."""

    def __init__(self, x: Tensor, start: int):
        """Initialize with hidden states x (T, hidden) of the tokens from position `start` on."""
        self.x = x
        self.start = start
        self._pending: AsyncSum | None = None

    @property
    def end(self) -> int:
        """Return the position after the chunk's last token."""
        return self.start + len(self.x)

    def start_sum(self, pending: AsyncSum) -> None:
        """Store an all-reduce in flight; `finish_sum` adds it to the hidden states."""
        self._pending = pending

    def finish_sum(self) -> Tensor:
        """Wait for the sum in flight, add it, and return the hidden states (T, hidden)."""
        if self._pending is not None:
            self.x = self.x + self._pending()
            self._pending = None  # frees the sum's memory
        return self.x


def in_chunks(x: Tensor, max_size: int) -> Iterator[Chunk]:
    """Yield all tokens of x (T, ...) in even chunks of at most `max_size`.

    Even chunks leave enough query tokens for a cache's observers in the last one. All but the last
    are multiples of a unit, so that prompts of many lengths have few shapes: kernels are compiled
    for each.
    """
    start = 0
    unit = 1 if max_size % ROWS else ROWS
    units = shares(ceil_div(len(x), unit), ceil_div(len(x), max_size))
    sizes = [unit * count for count in units]
    sizes[-1] -= sum(sizes) - len(x)
    for part in x.split(sizes):
        yield Chunk(part, start)
        start += len(part)


def pipelined(chunks: Iterable[T], stages: Sequence[Callable[[T], object]]) -> Iterator[T]:
    """Run every chunk through all stages in order, and yield it when it is done.

    In each round one more chunk enters, and each chunk in flight advances by one stage, the newest
    first. So an all-reduce that a stage starts overlaps the compute of newer chunks, and the
    chunk's next stage waits for it. There are never more chunks in flight than stages; after the
    last chunk has entered, len(stages) - 1 more rounds finish the rest.
    """
    at_stage: deque[T | None] = deque([None] * len(stages), maxlen=len(stages))
    for chunk in chain(chunks, repeat(None, len(stages) - 1)):
        at_stage.appendleft(chunk)  # all advance; the finished one drops out at the end
        for active, stage in zip(at_stage, stages, strict=True):
            if active is not None:
                stage(active)
        if at_stage[-1] is not None:
            yield at_stage[-1]
