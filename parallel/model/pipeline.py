"""The pipeline of a layer-major prefill: while the ranks sum one chunk, the next ones compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeVar

from torch import Tensor

from offload.attention.shape_buckets import ROWS
from offload.layout import ceil_div, shares
from parallel.ranks.process_group import AsyncSum

T = TypeVar("T")


class Chunk:
    """Tokens on their way through a layer: one chunk of a prompt, or all tokens of another pass."""

    def __init__(self, x: Tensor, start: int):
        """Begin with hidden states x (T, hidden) of the tokens from position `start` on."""
        self.x = x
        self.start = start
        self._pending: AsyncSum | None = None

    def start_sum(self, pending: AsyncSum) -> None:
        """Take a sum over ranks that is under way; `settle` adds it to the hidden states."""
        self._pending = pending

    def finish_sum(self) -> Tensor:
        """Return the hidden states (T, hidden), once what is under way has been added to them."""
        if self._pending is not None:
            self.x = self.x + self._pending()
            self._pending = None  # and the memory of the sum with it
        return self.x


def in_chunks(x: Tensor, most: int) -> Iterator[Chunk]:
    """Yield all tokens of x (T, ...) in even chunks, of `most` at most.

    Even, for the last rows are what followers of a cache see. All but the last are whole units, so
    that prompts of many lengths have few shapes: kernels are made for each.
    """
    start = 0
    unit = 1 if most % ROWS else ROWS
    sizes = [unit * each for each in shares(ceil_div(len(x), unit), ceil_div(len(x), most))]
    sizes[-1] -= sum(sizes) - len(x)
    for part in x.split(sizes):
        yield Chunk(part, start)
        start += len(part)


def pipelined(chunks: Iterable[T], stages: Sequence[Callable[[T], object]]) -> Iterator[T]:
    """Take every chunk through all stages in turn, and yield it when it is through.

    In each round one more chunk begins, and each of those under way goes on by one stage, the
    newest first. So what a stage starts is under way while younger chunks compute, and the chunk's
    next stage waits for it. There are never more chunks under way than stages; after the last chunk
    has begun, len(stages) - 1 more rounds finish the rest.
    """
    at_stage: deque[T | None] = deque([None] * len(stages), maxlen=len(stages))
    for chunk in chain(chunks, repeat(None, len(stages) - 1)):
        at_stage.appendleft(chunk)  # all move on; the last, which is through, drops out
        for each, stage in zip(at_stage, stages, strict=True):
            if each is not None:
                stage(each)
        if at_stage[-1] is not None:
            yield at_stage[-1]
