"""Lazy reading of checkpoints: a rank reads only its slices of a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel.errors import CheckpointError
from parallel.formats.gguf.header import LFS, check_lfs_pointer
from parallel.formats.plane_format import KeptType
from parallel.formats.weight_headers import (
    DTYPES,
    HEAD,
    TensorHeader,
    check_floats,
    is_vision,
    text_tensor,
    weight_files,
)

_OPEN_BYTES = 16 << 20  # bytes that are read from an open file
_DERIVED = "rotary_emb.inv_freq"  # suffix of tensors that are ignored: the config determines them


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


class Checkpoint(ABC):
    """A model's weights on disk, under their Hugging Face names.

    A subclass fills in the shapes when it opens its files, and implements reading of a tensor.
    """

    described_by = "config.json"  # source of the expected shapes, for messages
    # whether the weights of norms are stored less 1 in models that add it (Gemma)
    norms_have_offset = True

    def __init__(self, path: Path):
        self.path = path
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()  # names of the tensors requested so far
        self._vision: list[str] = []  # names of those of a part for images
        self._target_dtype = torch.float32
        self._keeps_blocks = False

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str, shape: tuple[int, ...]) -> Indexable:
        """Return the tensor `name`, without reading it.

        Raises CheckpointError if it is missing or its shape is not `shape`.
        """
        self.check_present(name)
        self._used.add(name)
        stored = self._shapes[name]
        if stored != shape:
            raise CheckpointError(
                f"{self._file_of(name).name}: tensor {name} has shape {stored}, but "
                f"{self.described_by} implies {shape}."
            )
        return self._open_tensor(name)

    def check_present(self, name: str) -> None:
        """Raise CheckpointError if there is no tensor `name`."""
        if name not in self._shapes:
            raise CheckpointError(
                f"{self.path}: tensor {name} is missing; the checkpoint has {len(self._shapes)} "
                "tensors. Was the download interrupted? Fetch it again, or point at a complete "
                "model."
            )

    def check_unused(self, is_tied: bool = False, is_text: bool = False) -> None:
        """Raise CheckpointError if tensors are unused: the model's output would depend on them.

        Args:
            is_tied: the head is tied to the embedding, of which the files may hold a copy; with a
                head that differs the model would not be tied (`config_file`).
            is_text: the model is the text model of a larger one.
        """
        unused = self._shapes.keys() - self._used - ({HEAD} if is_tied else set())
        unused |= set() if is_text else set(self._vision)
        leftovers = sorted(name for name in unused if not name.endswith(_DERIVED))
        if leftovers:
            raise CheckpointError(
                f"{self.path}: {len(leftovers)} tensors are not part of the model that "
                f"{self.described_by} describes, first {leftovers[0]}. The config does not belong "
                "to these weights, or the architecture has parts that are not supported."
            )

    def check_sizes(self, layers: int, parameters: int) -> None:
        """Raise CheckpointError if a config describes a far larger model than the files hold.

        Called before memory is allocated. `layers` is the model's number of layers, `parameters`
        that of one rank's weights.
        """
        stored = sum(prod(shape) for shape in self._shapes.values())
        if layers > len(self._shapes) or parameters > 2 * stored:
            raise CheckpointError(
                f"{self.path}: {self.described_by} describes {layers} layers and at least "
                f"{parameters:,} weights, but the files hold {len(self._shapes)} tensors with "
                f"{stored:,} in all. They do not belong together: fetch both again."
            )

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype to compute in if neither the user nor the config specifies one."""

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of quantised tensors that are read as numbers."""
        self._target_dtype = dtype

    def keep_blocks(self) -> None:
        """Let quantised tensors be kept as they are."""
        self._keeps_blocks = True

    @abstractmethod
    def _open_tensor(self, name: str) -> Indexable:
        """Return a tensor that exists."""

    @abstractmethod
    def _file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""


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


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a folder: one file, or several with an index."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self._reader = SafetensorsReader()
        self._headers: dict[str, TensorHeader] = {}
        for path in weight_files(folder):
            self._scan(path)
        self._index()

    @property
    def dtype(self) -> torch.dtype:
        """The most common dtype of the tensors."""
        kinds = Counter(self._headers[name].dtype for name in self._shapes)
        return getattr(torch, DTYPES[kinds.most_common(1)[0][0]])

    def _index(self) -> None:
        """Set the shapes of the model's tensors. Raises CheckpointError for their types."""
        check_floats(self._headers.values())
        self._shapes = {name: header.shape for name, header in self._headers.items()}

    def _open_tensor(self, name: str) -> Indexable:
        return TensorSlice(self._reader, self._headers[name])

    def _file_of(self, name: str) -> Path:
        return self._headers[name].path

    def _scan(self, path: Path) -> None:
        """Record the tensors of a file. Raises CheckpointError."""
        with self._open(path) as file:
            for stored_name in file.keys():  # noqa: SIM118 - a safetensors file, not a dict
                name = text_tensor(stored_name)
                if name is None:
                    self._vision += [stored_name] if is_vision(stored_name) else []
                    continue
                if name in self._headers:
                    before = self._headers[name].path.name
                    raise CheckpointError(
                        f"{self.folder}: tensor {name} is in {before} and in {path.name}, which "
                        "is ambiguous. Fetch the model again."
                    )
                tensor = file.get_slice(stored_name)
                shape = tuple(tensor.get_shape())
                self._headers[name] = TensorHeader(path, stored_name, tensor.get_dtype(), shape)

    def _open(self, path: Path) -> Any:
        try:
            with path.open("rb") as file:
                check_lfs_pointer(path, file.read(len(LFS)))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({error}). Was the download "
                "interrupted? Fetch it again."
            ) from error
