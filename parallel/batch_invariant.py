"""Products and norms whose numbers for a row do not depend on the rows beside it.

Inside `batch_invariant` what works on rows does so in blocks of one shape. A row has its place in them by
its position in the text (`Llama.forward`), so the same kernel does the same sums for it in every
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from offload.kernels.batch_invariant_shape import ROW_BLOCK

_rows: ContextVar[int | None] = ContextVar("rows", default=None)  # of a block, where there are any


@contextmanager
def batch_invariant(rows: int = ROW_BLOCK) -> Iterator[None]:
    """Compute in blocks of so many rows inside."""
    before = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(before)


def blocks_of(x: Tensor) -> Sequence[Tensor]:
    """Return x (T, ...) in blocks, or as one where there are none."""
    rows = _rows.get()
    return (x,) if rows is None else x.split(rows)


def in_blocks(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return compute(*inputs), of rows (T, ...), block by block where there are blocks."""
    if _rows.get() is None:  # as in most passes, of which every product comes by here
        return compute(*inputs)
    blocks = list(zip(*map(blocks_of, inputs), strict=True))
    if len(blocks) == 1:
        return compute(*inputs)
    return torch.cat([compute(*block) for block in blocks])


def row_by_row(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return compute(*inputs) likewise, each row alone: how it is done depends on its values."""
    if _rows.get() is None:
        return compute(*inputs)
    with batch_invariant(1):
        return in_blocks(compute, *inputs)
