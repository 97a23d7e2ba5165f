"""Matmuls and norms that are batch-invariant: a row's result does not depend on the other rows.

Inside `batch_invariant`, row-wise operations run in blocks of one shape. A row's place in its block
follows from its position in the sequence (`Transformer.forward`), so the same kernel performs the
same sums for it in every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from offload.kernels.batch_invariant_shape import ROW_BLOCK

# rows per block inside `batch_invariant`, None outside
_block_rows: ContextVar[int | None] = ContextVar("block_rows", default=None)


@contextmanager
def batch_invariant(rows: int = ROW_BLOCK) -> Iterator[None]:
    """Compute in blocks of `rows` rows inside the context."""
    token = _block_rows.set(rows)
    try:
        yield
    finally:
        _block_rows.reset(token)


def is_batch_invariant() -> bool:
    """Return whether the caller is inside of `batch_invariant`."""
    return _block_rows.get() is not None


def row_blocks(x: Tensor) -> Sequence[Tensor]:
    """Return x (T, ...) split into blocks, or as a whole outside of `batch_invariant`."""
    rows = _block_rows.get()
    return (x,) if rows is None else x.split(rows)


def map_blocks(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return compute(*inputs) of rows (T, ...), block by block inside `batch_invariant`."""
    if _block_rows.get() is None:  # fast path: every matmul of most forwards
        return compute(*inputs)
    blocks = list(zip(*map(row_blocks, inputs), strict=True))
    if len(blocks) == 1:
        return compute(*inputs)
    return torch.cat([compute(*block) for block in blocks])


def map_rows(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return compute(*inputs) as `map_blocks`, but row by row: for value-dependent computations."""
    if _block_rows.get() is None:
        return compute(*inputs)
    with batch_invariant(1):
        return map_blocks(compute, *inputs)
