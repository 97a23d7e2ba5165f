"""GGUF files as checkpoints: quantised blocks are dequantised while they are read.

A rank reads only the bytes of its rows, in bounded chunks. The file is read rather than mapped, so
that none of its pages count as this process's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from offload.layout import ceil_div
from parallel.errors import CheckpointError
from parallel.formats.checkpoint import Checkpoint
from parallel.formats.gguf.families import family_of, tensors_in
from parallel.formats.gguf.header import TensorInfo, read_header
from parallel.formats.gguf.metadata import config_fields, tensor_names
from parallel.formats.gguf.tensors import TYPES, check_end
from parallel.formats.plane_format import KeptType, is_kept, kept_type
from parallel.formats.tensors import BlockTensor

_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = tuple(GGMLQuantizationType(number) for number in TYPES)
_CHUNK_ELEMENTS = 1 << 20  # elements per dequantised chunk, which takes about 10 bytes per element


class GgufTensor(BlockTensor):
    """A tensor in a GGUF file; indexing with slices reads those rows and converts those columns."""

    def __init__(self, info: TensorInfo, dtype: torch.dtype, keeps_blocks: bool = False):
        self.path, self.info, self.dtype = info.path, info, dtype
        self.name, self.shape, self.keeps_blocks = info.name, info.shape, keeps_blocks
        self.kind = GGMLQuantizationType(info.kind)
        self.block, self.block_bytes = GGML_QUANT_SIZES[self.kind]  # elements per block, and bytes

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return rows, or rows and columns, of a matrix, or a slice of a vector."""
        if len(self.shape) > 1:
            return super().__getitem__(index)
        (part,) = index if isinstance(index, tuple) else (index,)
        return self.read(slice(0, 1), slice(0, self.shape[0])).view(-1)[part]

    def kept_type(self, columns: slice) -> KeptType | None:
        """Return how these columns are kept, if blocks are and they are whole ones."""
        may_keep = self.keeps_blocks and len(self.info.shape) == 2
        kind = kept_type(self.kind.name) if may_keep else None
        return kind if kind is not None and is_kept(kind, columns) else None

    def blocks(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Yield the blocks (R, B, bytes) uint8 of rows that overlap the columns, few at a time.

        A vector is one row. Raises CheckpointError.
        """
        width = self.info.shape[-1]
        step = max(1, _CHUNK_ELEMENTS // width)
        row_bytes = width // self.block * self.block_bytes
        own = self._block_slice(columns)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.info.start + rows.start * row_bytes)
                for start in range(rows.start, rows.stop, step):
                    count = min(step, rows.stop - start)
                    raw = torch.from_numpy(self._read_bytes(file, count, row_bytes))
                    yield raw.unflatten(1, (-1, self.block_bytes))[:, own]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _block_slice(self, columns: slice) -> slice:
        """Return the blocks of a row that overlap the columns."""
        first = columns.start // self.block
        return slice(first, max(first, ceil_div(columns.stop, self.block)))

    def numbers(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Yield rows few at a time, of whole blocks."""
        for raw in self.blocks(rows, columns):
            yield torch.from_numpy(self._dequantize(raw.flatten(1).numpy()))

    def _read_bytes(self, file: BinaryIO | Any, rows: int, row_bytes: int) -> np.ndarray:
        """Return the bytes (rows, row_bytes) of the next rows."""
        raw = np.fromfile(file, dtype=np.uint8, count=rows * row_bytes)
        if len(raw) < rows * row_bytes:
            raise CheckpointError(
                f"{self.path} ends within tensor {self.info.name}. Fetch the file again."
            )
        return raw.reshape(rows, row_bytes)

    def _dequantize(self, raw: np.ndarray) -> np.ndarray:
        """Return the elements of rows of whole blocks; converting one long row is fastest."""
        with np.errstate(invalid="ignore", over="ignore"):  # the caller checks the result
            return dequantize(raw.reshape(1, -1), self.kind).reshape(len(raw), -1)


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file, or of all parts of a split model, by its first."""

    described_by = "its metadata"
    is_converted = True

    def __init__(self, path: Path):
        super().__init__(path)
        header = read_header(path)
        family = family_of(header)
        fields = config_fields(header)  # checks what the file says of itself
        self._infos: dict[str, TensorInfo] = {}
        for stored, names in tensor_names(header, family, fields):
            check_end(header, stored)
            self._infos |= dict(tensors_in(stored, names))
        self._shapes = {name: info.shape for name, info in self._infos.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The most common dtype of the matrices; bfloat16 if any are quantised.

        bfloat16 is the 16-bit dtype in which no activation overflows.
        """
        matrices = (info for info in self._infos.values() if len(info.shape) > 1)
        kinds = Counter(GGMLQuantizationType(info.kind).name for info in matrices)
        if not kinds.keys() <= _FLOAT_DTYPES.keys():
            return torch.bfloat16
        return _FLOAT_DTYPES[kinds.most_common(1)[0][0] if kinds else "F32"]

    def _open_tensor(self, name: str) -> GgufTensor:
        info = self._infos[name]
        is_exact = info.kind == GGMLQuantizationType.F32  # norms, biases, routers
        dtype = torch.float32 if is_exact else self._target_dtype
        return GgufTensor(info, dtype, self._keeps_blocks)

    def _file_of(self, name: str) -> Path:
        return self._infos[name].path
