"""Safetensors files with quantised matrices: AWQ, GPTQ, AutoRound, compressed-tensors and FP8.

Each layout is read as codes with a scale for each group, and perhaps a zero point. A weight is
(code - zero) * scale in float32, rounded once to the run's dtype. Sources of the layouts: Lin et
al. 2024, AWQ, arXiv 2306.00978, and WQLinear_GEMM of github.com/casper-hansen/AutoAWQ; Frantar et
al. 2023, GPTQ, arXiv 2210.17323, and github.com/ModelCloud/GPTQModel; pack_quantized and
naive_quantized of github.com/vllm-project/compressed-tensors; finegrained_fp8 of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from offload.layout import ceil_div
from parallel.errors import CheckpointError
from parallel.formats.checkpoint import SafetensorsCheckpoint
from parallel.formats.group_headers import GroupHeader, broken_matrix, group_headers
from parallel.formats.plane_format import KeptType, is_kept
from parallel.formats.quantisation import Quantisation
from parallel.formats.tensors import (
    BlockTensor,
    Indexable,
    Parts,
    SafetensorsReader,
    TensorSlice,
)

_CHUNK_CODES = 1 << 22  # codes per chunk, each of which takes up to ten bytes
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # places in a word of eight consecutive rows
_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each place of a word


class GroupTensor(BlockTensor):
    """A quantised matrix; indexing with slices reads that part and converts it to numbers."""

    def __init__(
        self,
        reader: SafetensorsReader,
        header: GroupHeader,
        dtype: torch.dtype,
        keeps_groups: bool = False,
    ):
        self.reader, self.header = reader, header
        self.dtype, self.keeps_groups = dtype, keeps_groups
        self.path, self.name, self.shape = header.codes.path, header.name, header.shape
        self.block = header.group

    @property
    def unit(self) -> int:
        """The number of columns that are read together: those of a word."""
        return self.header.per_word

    def numbers(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Yield rows few at a time in float32, of whole words."""
        unit = self.unit
        read = slice(columns.start // unit * unit, ceil_div(columns.stop, unit) * unit)
        if self._g_idx is None:
            groups = self.header.overlapping_groups(read)
            group = torch.arange(read.start, read.stop) // self.header.group - groups.start
        else:
            groups, group = slice(0, self.header.groups), self._g_idx[read]
        for parts in self._parts(rows, read, groups):
            yield self._numbers(parts, group)

    def kept_type(self, columns: slice) -> KeptType | None:
        """Return how these columns are kept, if groups are and their columns are in order."""
        kind = self.header.planes if self.keeps_groups else None
        if kind is None or not is_kept(kind, columns):
            return None
        is_whole = columns.stop - columns.start == self.header.shape[1]
        return kind if is_whole or self._is_in_order else None

    def blocks(self, rows: slice, columns: slice) -> Iterator[Parts]:
        """Yield the parts of rows, few at a time. Raises CheckpointError."""
        order = self.order()
        for parts in self._parts(rows, columns, self.header.overlapping_groups(columns)):
            if order is not None:
                parts["codes"] = parts["codes"].index_select(1, order)
            yield parts

    def order(self) -> Tensor | None:
        """Return the columns (columns,) int64, group by group; None if that is their own order.

        Raises CheckpointError if a group has another size than the config says.
        """
        if self._g_idx is None or self._is_in_order:
            return None
        order = self._g_idx.argsort(stable=True)
        if not torch.equal(self._g_idx[order], self._own_groups):
            what = f"has groups of other sizes than {self.header.group} columns (g_idx)"
            raise broken_matrix(self.path, self.name, what)
        return order

    def scale_error(self) -> CheckpointError:
        """Return the error for a scale or a code that is not finite."""
        return broken_matrix(self.path, self.name, "has weights that are not finite")

    @property
    def _own_groups(self) -> Tensor:
        """The groups (columns,) int64 of columns that are in order."""
        return torch.arange(self.header.shape[1]) // self.header.group

    @cached_property
    def _g_idx(self) -> Tensor | None:
        """The group (columns,) int64 of each column; None if the file does not say it."""
        if self.header.g_idx is None:
            return None
        groups = TensorSlice(self.reader, self.header.g_idx)[:].long()
        if self.header.layout == "rows" and bool((groups == -1).any()):
            return None  # columns in order, as the library itself reads it
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < self.header.groups:
            what = f"has {self.header.groups} groups, but g_idx names {int(groups.min())}"
            raise broken_matrix(self.path, self.name, f"{what} to {int(groups.max())}")
        return groups

    @cached_property
    def _is_in_order(self) -> bool:
        return self._g_idx is None or torch.equal(self._g_idx, self._own_groups)

    def _numbers(self, parts: Parts, group: Tensor) -> Tensor:
        """Return weights (R, C) float32; `group` (C,) is the index of each column's scale."""
        codes = parts["codes"]
        if self.header.code_type == "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            values = codes.float()
        if "zero" in parts:
            values.sub_(parts["zero"].float()[:, group])
        elif self.header.code_type == "int4":
            values.sub_(8.0)
        return values.mul_(parts["scale"].float()[:, group])

    def _parts(self, rows: slice, columns: slice, groups: slice) -> Iterator[Parts]:
        """Yield codes (R, C) uint8 or int8, scale and zero (R, G) of rows, few at a time.

        Columns are whole words.
        """
        scale = self._scale(rows, groups)
        zero = self._zero(rows, groups)
        start = 0
        for codes in self._codes(rows, columns):
            own = slice(start, start + len(codes))
            parts = {"codes": codes, "scale": scale[own]}
            yield parts if zero is None else {**parts, "zero": zero[own]}
            start += len(codes)

    def _codes(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Yield codes (R, C): of 4 bits uint8, of 8 bits int8 with a sign."""
        header, stored = self.header, TensorSlice(self.reader, self.header.codes)
        per_word = header.per_word
        step = max(1, _CHUNK_CODES // max(1, columns.stop - columns.start))
        step = ceil_div(step, 8) * 8
        words = slice(columns.start // per_word, ceil_div(columns.stop, per_word))
        if header.layout == "gptq":
            whole = stored[words, rows]  # at once, since a part of its columns touches all pages
            for part in whole.split(step, dim=1):
                yield _unpack(part.t(), header)
        elif header.layout == "awq":
            first, last = rows.start // per_word, ceil_div(rows.stop, per_word)
            whole = stored[columns, slice(first, last)]
            row = first * per_word
            for part in whole.split(step // per_word, dim=1):
                unpacked = _unpack(part, header).t()
                yield unpacked[max(0, rows.start - row) : rows.stop - row].contiguous()
                row += len(unpacked)
        else:
            for start in range(rows.start, rows.stop, step):
                part = stored[slice(start, min(start + step, rows.stop)), words]
                yield part.view(torch.int8) if per_word == 1 else _unpack(part, header)

    def _scale(self, rows: slice, groups: slice) -> Tensor:
        """Return the scales (R, G) of rows and groups."""
        header = self.header
        stored, shape = TensorSlice(self.reader, header.scale), header.scale.shape
        if header.layout != "rows":
            return stored[groups, rows].t()
        scale = _spread(stored, shape, header.block_rows, rows, groups)
        return scale.to(torch.bfloat16) if scale.dtype == torch.float8_e8m0fnu else scale

    def _zero(self, rows: slice, groups: slice) -> Tensor | None:
        """Return the zero points (R, G) of rows and groups: as codes, or with a sign."""
        header = self.header
        if header.zero is None:
            return None
        stored = TensorSlice(self.reader, header.zero)
        if header.zero.dtype == "I8":
            zero = _spread(stored, header.zero.shape, header.block_rows, rows, groups)
            return (zero + 8).view(torch.uint8) if header.code_type == "int4" else zero
        per_word = header.per_word
        first, last = rows.start // per_word, ceil_div(rows.stop, per_word)
        own = slice(rows.start - first * per_word, rows.stop - first * per_word)
        if header.layout == "rows":
            return _unpack(stored[slice(first, last), groups].t(), header).t()[own]
        words = stored[groups, slice(first, last)]
        if header.is_zero_less_one:  # with a carry, as GPTQModel reads and writes words
            words = words + _ONES[32 // per_word]
        return _unpack(words, header).t()[own]


def _unpack(words: Tensor, header: GroupHeader) -> Tensor:
    """Return the codes (R, n * per_word) in words (R, n) int32, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if header.code_type != "int4":
        return (data ^ 128).view(torch.int8)  # less 128, as the zeros are
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
    if header.layout == "awq":
        codes = codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
    return codes


def _spread(
    stored: TensorSlice, shape: tuple[int, ...], block_rows: int, rows: slice, groups: slice
) -> Tensor:
    """Return scales (R, G) of rows and groups, stored for a tensor, for rows, or for blocks."""
    count = rows.stop - rows.start
    if len(shape) < 2 and shape in ((), (1,)):
        return stored[...].reshape(1, 1).expand(count, 1)
    if len(shape) == 1:
        return stored[rows][:, None]
    first = rows.start // block_rows
    scale = stored[slice(first, ceil_div(rows.stop, block_rows)), groups]
    skipped = rows.start - first * block_rows
    return scale.repeat_interleave(block_rows, dim=0)[skipped : skipped + count]


class GroupCheckpoint(SafetensorsCheckpoint):
    """The safetensors files of a folder, some of whose matrices are quantised."""

    def __init__(self, folder: Path, quantisation: Quantisation):
        self._quantisation = quantisation
        self._matrices: dict[str, GroupHeader] = {}
        super().__init__(folder)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, the 16-bit dtype in which no activation overflows."""
        return torch.bfloat16

    def check_unused(
        self, is_tied: bool = False, is_text: bool = False, others: tuple[str, ...] = ()
    ) -> None:
        """Raise CheckpointError if tensors are unused.

        GPTQ gives each quantised matrix a bias, which is zero if the model has none.
        """
        for name in self._shapes.keys() - self._used:
            matrix = f"{name.removesuffix('.bias')}.weight"
            has_bias = name.endswith(".bias") and matrix in self._matrices
            if has_bias and not self._open_tensor(name)[:].any():
                self._used.add(name)
        super().check_unused(is_tied, is_text, others)

    def _index(self) -> None:
        self._matrices, parts = group_headers(self._headers, self._quantisation)
        for name, header in self._headers.items():
            if name not in parts:
                self._shapes[name] = header.shape
        for name, matrix in self._matrices.items():
            if name in self._shapes:
                raise CheckpointError(
                    f"{self.folder}: matrix {name} is stored twice, quantised and not, which is "
                    "ambiguous. Fetch the model again."
                )
            self._shapes[name] = matrix.shape

    def _open_tensor(self, name: str) -> Indexable:
        if name in self._matrices:
            return GroupTensor(
                self._reader, self._matrices[name], self._target_dtype, self._keeps_blocks
            )
        return super()._open_tensor(name)

    def _file_of(self, name: str) -> Path:
        return self._matrices[name].codes.path if name in self._matrices else super()._file_of(name)
