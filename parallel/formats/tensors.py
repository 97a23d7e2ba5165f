"""Tensors on disk, of which only parts are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel.errors import CheckpointError
from parallel.formats.plane_format import KeptType
from parallel.formats.weight_headers import TensorHeader

_OPEN_BYTES = 16 << 20  # bytes that are read from an open file


class Indexable(Protocol):
    """A tensor on disk; indexing with slices reads only that part."""

    def __getitem__(self, index: Any) -> Tensor: ...


Parts = dict[str, Tensor]  # codes, scales and zeros or minima of rows, by name


class BlockTensor(ABC):
    """A tensor on disk in quantised blocks, which may stay as they are."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # the numbers' own
    block: int  # columns in a block

    @property
    def unit(self) -> int:
        """The number of columns that are read together."""
        return self.block

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return rows, or rows and columns, of a matrix as numbers."""
        parts = index if isinstance(index, tuple) else (index,)
        rows, columns = (
            slice(*part.indices(size)[:2])
            for part, size in zip((*parts, slice(None))[:2], self.shape, strict=True)
        )
        return self.read(rows, columns)

    def read(self, rows: slice, columns: slice) -> Tensor:
        """Return rows and columns as numbers; they may cut blocks. Raises CheckpointError."""
        width, skipped = columns.stop - columns.start, columns.start % self.unit
        out = torch.empty(rows.stop - rows.start, width, dtype=self.dtype)
        start = 0
        for values in self.numbers(rows, columns):
            # numpy's function needs a byte per number, torch's seven
            if self.block > 1 and not np.isfinite(values.numpy()).all():
                raise self.scale_error()
            out[start : start + len(values)].copy_(values[:, skipped : skipped + width])
            start += len(values)
            del values  # before the next are made
        return out

    @abstractmethod
    def numbers(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Yield rows few at a time, of all whole units that overlap the columns."""

    def scale_error(self) -> CheckpointError:
        """Return the error for a block whose scale is not finite."""
        return CheckpointError(
            f"{self.path}: tensor {self.name} has a scale that is not finite: the file is broken. "
            "Fetch it again."
        )

    @abstractmethod
    def kept_type(self, columns: slice) -> KeptType | None:
        """Return how these columns are kept; None if they are read as numbers."""

    @abstractmethod
    def blocks(self, rows: slice, columns: slice) -> Iterator[Tensor | Parts]:
        """Yield rows few at a time, as blocks or as their parts.

        Blocks (R, B, bytes) uint8 are ggml's that overlap the columns. Of the parts, codes (R,
        columns) are bytes; scale and zero (R, G) are those of the groups that overlap them.
        """

    def order(self) -> Tensor | None:
        """Return the columns (columns,) int64 in the order of the codes that `blocks` yields.

        None if that is their own.
        """
        return None


class ColumnParts:
    """Some columns of a matrix on disk, side by side: they are read as numbers."""

    def __init__(self, tensor: Indexable, parts: Sequence[slice]):
        self.tensor, self.parts = tensor, parts

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows, and columns among those of the parts."""
        rows, columns = index
        return torch.cat([self.tensor[rows, part] for part in self.parts], dim=-1)[:, columns]


class SafetensorsReader:
    """Reads parts of tensors, and keeps one file open: finding a tensor in it takes far longer.

    The file is closed after some reading, which releases its pages.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._remaining = 0  # bytes that may be read before the file is closed

    def read(self, header: TensorHeader, index: Any) -> Tensor:
        """Return the part of a tensor that slices select. Raises CheckpointError."""
        try:
            if self._path != header.path:
                self._path, self._file = header.path, safe_open(header.path, framework="pt")
                self._remaining = _OPEN_BYTES
            part: Tensor = self._file.get_slice(header.name)[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{header.path.name}: tensor {header.name} cannot be read ({error}). Fetch the "
                "file again."
            ) from error
        self._remaining -= part.nbytes
        if self._remaining < 0:
            self._path = self._file = None
        return part


class TensorSlice:
    """A tensor on disk; indexing reads only that part."""

    def __init__(self, reader: SafetensorsReader, header: TensorHeader):
        self.reader, self.header, self.shape = reader, header, header.shape

    def __getitem__(self, index: Any) -> Tensor:
        return self.reader.read(self.header, index)
