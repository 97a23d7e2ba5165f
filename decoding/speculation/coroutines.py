"""How decoders get their passes: they ask, and whoever runs them answers with logits.

So one who runs several decoders may make their passes as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from parallel.execution.batched_forward import ForwardRequest

T = TypeVar("T")
Steps = Generator[
    ForwardRequest, Tensor, T
]  # yields each pass, is sent its logits (rows, V), returns a T


def run(passes: Steps[T], make: Callable[[ForwardRequest], Tensor]) -> T:
    """Make the passes one after another, and return what comes of them all."""
    logits: Tensor | None = None
    while True:
        try:
            asked = next(passes) if logits is None else passes.send(logits)
        except StopIteration as end:
            return end.value
        logits = make(asked)


class Clock:
    """Seconds, less those in which texts waited for something that is no pass of theirs."""

    def __init__(self) -> None:
        self._away = 0.0
        self._stopped: float | None = None  # when, while it stands

    def __call__(self) -> float:
        now = time.perf_counter() if self._stopped is None else self._stopped
        return now - self._away

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no seconds meanwhile."""
        self._stopped = time.perf_counter()
        try:
            yield
        finally:
            self._away += time.perf_counter() - self._stopped
            self._stopped = None
