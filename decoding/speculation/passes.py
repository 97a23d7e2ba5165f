"""How decoders get their passes: they ask, and whoever runs them answers with logits.

So one who runs several decoders may make their passes as one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from torch import Tensor

from parallel.passes import Pass

T = TypeVar("T")
Passes = Generator[Pass, Tensor, T]  # yields each pass, is sent its logits (rows, V), returns a T


def drive(passes: Passes[T], make: Callable[[Pass], Tensor]) -> T:
    """Make the passes one after another, and return what comes of them all."""
    try:
        asked = next(passes)
        while True:
            asked = passes.send(make(asked))
    except StopIteration as end:
        return end.value
