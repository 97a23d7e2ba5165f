"""Decoders as coroutines: they yield forward requests, and the caller sends back logits.

A caller that runs several decoders can so batch their forwards into one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from parallel.execution.batched_forward import ForwardRequest

T = TypeVar("T")
# yields forward requests, is sent the logits (rows, V) of each, and returns a T
Steps = Generator[ForwardRequest, Tensor, T]


def run(steps: Steps[T], forward: Callable[[ForwardRequest], Tensor]) -> T:
    """Run the forwards one after another, and return the result of the coroutine."""
    logits: Tensor | None = None
    while True:
        try:
            request = next(steps) if logits is None else steps.send(logits)
        except StopIteration as end:
            return end.value
        logits = forward(request)


class Clock:
    """Seconds, less the time that requests spent waiting for something other than a forward."""

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._paused_at: float | None = None  # None while running

    def __call__(self) -> float:
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        return now - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no seconds inside this context."""
        self._paused_at = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - self._paused_at
            self._paused_at = None
