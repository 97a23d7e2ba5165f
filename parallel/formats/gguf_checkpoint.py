"""GGUF files as checkpoints: quantised blocks are dequantised while they are read.

A rank reads only the bytes of its rows, in bounded chunks. The file is read rather than mapped, so
that none of its pages count as this process's memory.
"""

from __future__ import annotations

from collections import Counter
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
from parallel.formats.gguf_header import TensorInfo, read_header
from parallel.formats.gguf_names import ROPE_FACTORS, config_fields, family_of
from parallel.formats.gguf_tensors import TYPES, check_end

_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = tuple(GGMLQuantizationType(number) for number in TYPES)
_CHUNK_ELEMENTS = 1 << 20  # elements per dequantised chunk, which takes about 10 bytes per element


class GgufTensor:
    """A tensor in a GGUF file; indexing with slices reads those rows and converts those columns.

    With `head_dim`, the rows of each head are permuted back into Hugging Face's order.
    """

    def __init__(self, path: Path, info: TensorInfo, dtype: torch.dtype, head_dim: int | None):
        self.path, self.info, self.dtype, self.head_dim = path, info, dtype, head_dim
        self.kind = GGMLQuantizationType(info.kind)
        self.block, self.block_bytes = GGML_QUANT_SIZES[self.kind]  # elements per block, and bytes

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Return rows, or rows and columns, of a matrix, or a slice of a vector."""
        parts = index if isinstance(index, tuple) else (index,)
        shape = self.info.shape
        if len(shape) == 1:
            return self._read_reordered(slice(0, 1), slice(0, shape[0]), shape)[parts[0]]
        rows, columns, *_ = (*parts, slice(None))
        row_slice = slice(*rows.indices(shape[0])[:2])
        return self._read_reordered(row_slice, slice(*columns.indices(shape[1])[:2]), shape)

    def _read_reordered(self, rows: slice, columns: slice, shape: tuple[int, ...]) -> Tensor:
        """Return a slice with its rows in Hugging Face's order; it may cut heads."""
        if self.head_dim is None:
            return self._read(rows, columns, shape)
        if len(shape) == 1:
            return self._unpermute(self._read(rows, columns, shape))
        first = rows.start // self.head_dim * self.head_dim
        last = ceil_div(rows.stop, self.head_dim) * self.head_dim
        whole = self._unpermute(self._read(slice(first, last), columns, shape))
        return whole[rows.start - first : rows.stop - first]

    def _unpermute(self, rows: Tensor) -> Tensor:
        """Return rows (heads * D, ...) with the first half of each head before the second.

        The file interleaves the halves: row 0 of the first, row 0 of the second, and so on.
        """
        pairs = rows.unflatten(0, (-1, self.head_dim // 2, 2))  # type: ignore[operator]
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _read(self, rows: slice, columns: slice, shape: tuple[int, ...]) -> Tensor:
        """Return rows and columns in the file's order; a vector as a whole."""
        width = shape[-1]
        first = columns.start // self.block  # first block that overlaps the columns
        last = max(first, ceil_div(columns.stop, self.block))
        row_bytes = width // self.block * self.block_bytes
        byte_range = slice(first * self.block_bytes, last * self.block_bytes)
        skipped = columns.start - first * self.block
        count, column_count = rows.stop - rows.start, columns.stop - columns.start
        out = torch.empty(count, column_count, dtype=self.dtype)
        chunk_rows = max(1, _CHUNK_ELEMENTS // width)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.info.start + rows.start * row_bytes)
                for start in range(0, count, chunk_rows):
                    part = out[start : start + chunk_rows]
                    raw = self._read_bytes(file, len(part), row_bytes)
                    values = self._dequantize(np.ascontiguousarray(raw[:, byte_range]))
                    part.copy_(torch.from_numpy(values[:, skipped : skipped + column_count]))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
        return out.view(-1) if len(shape) == 1 else out

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
        return dequantize(raw.reshape(1, -1), self.kind).reshape(len(raw), -1)


class GgufCheckpoint(Checkpoint):
    """The tensors of one GGUF file."""

    described_by = "its metadata"

    def __init__(self, path: Path):
        super().__init__(path)
        header = read_header(path)
        family = family_of(header)
        self._head_dim = config_fields(header)["head_dim"] if family.interleaved_rope else None
        self._infos: dict[str, TensorInfo] = {}
        self._target_dtype = torch.float32
        for info in header.tensors.values():
            if info.name == ROPE_FACTORS:  # part of the config
                continue
            check_end(header, info)
            name = family.tensor_name(info.name) or info.name
            if name in self._infos:
                raise CheckpointError(
                    f"{path}: {self._infos[name].name} and {info.name} are both tensor {name}: the "
                    "file is broken. Fetch it again."
                )
            self._infos[name] = info
            self._shapes[name] = info.shape

    @property
    def dtype(self) -> torch.dtype:
        """The most common dtype of the matrices; bfloat16 if they are quantised.

        bfloat16 is the 16-bit dtype in which no activation overflows.
        """
        matrices = (info for info in self._infos.values() if len(info.shape) > 1)
        kinds = Counter(GGMLQuantizationType(info.kind).name for info in matrices)
        return _FLOAT_DTYPES.get(kinds.most_common(1)[0][0] if kinds else "F32", torch.bfloat16)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the tensors that are read."""
        self._target_dtype = dtype

    def _open_tensor(self, name: str) -> GgufTensor:
        is_permuted = "self_attn.q_proj" in name or "self_attn.k_proj" in name
        head_dim = self._head_dim if is_permuted else None
        return GgufTensor(self.path, self._infos[name], self._target_dtype, head_dim)

    def _file_of(self, name: str) -> Path:
        return self.path
