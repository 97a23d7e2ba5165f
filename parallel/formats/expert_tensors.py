"""Reading of experts from safetensors files that stack those of a layer (`expert_headers`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from offload.layout import ceil_div
from parallel.formats.expert_headers import MXFP4, ExpertHeader
from parallel.formats.plane_format import GROUP, MAX_E8M0, KeptType, is_kept
from parallel.formats.tensors import BlockTensor, Indexable, Parts, SafetensorsReader

_CHUNK_CODES = 1 << 22  # codes per chunk, each of which takes up to ten bytes
_EXPONENT_BIAS = 128  # one more than the format has, since values are doubled


def open_expert(
    reader: SafetensorsReader, header: ExpertHeader, dtype: torch.dtype, keeps_blocks: bool
) -> Indexable:
    """Return a matrix or bias of an expert; `dtype` is that of the numbers of a quantised one."""
    if header.scale is None:
        return ExpertTensor(reader, header)
    return MxExpertTensor(reader, header, dtype, keeps_blocks)


class ExpertTensor:
    """A matrix or bias of an expert in numbers; indexing with slices reads that part."""

    def __init__(self, reader: SafetensorsReader, header: ExpertHeader):
        self.reader, self.header, self.shape = reader, header, header.shape

    def __getitem__(self, index: Any) -> Tensor:
        header, parts = self.header, index if isinstance(index, tuple) else (index,)
        own = [
            slice(*part.indices(size)[:2])
            for part, size in zip((*parts, slice(None)), self.shape, strict=False)
        ]
        rows, columns = header.stored_rows(own[0]), own[1:]
        if header.is_transposed:
            stored = self.reader.read(header.stack, (header.expert, *columns, rows))
            return stored[:, :: header.step].t()
        return self.reader.read(header.stack, (header.expert, rows, *columns))[:: header.step]


class MxExpertTensor(BlockTensor):
    """A matrix of an expert in MXFP4; indexing with slices reads that part as numbers.

    Source: OCP Microscaling Formats 1.0, section 6.3.
    """

    block = GROUP

    def __init__(
        self,
        reader: SafetensorsReader,
        header: ExpertHeader,
        dtype: torch.dtype,
        keeps_blocks: bool = False,
    ):
        self.reader, self.header = reader, header
        self.dtype, self.keeps_blocks = dtype, keeps_blocks
        self.path, self.name, self.shape = header.stack.path, header.name, header.shape

    def numbers(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Yield rows few at a time in float32, of whole groups."""
        values = torch.tensor(MXFP4.values, dtype=torch.float32)
        for parts in self.blocks(rows, columns):
            exponents = parts["sub"].int() - _EXPONENT_BIAS
            by_group = values[parts["codes"].int()].unflatten(1, (-1, GROUP))
            yield torch.ldexp(by_group, exponents[..., None]).flatten(1)

    def kept_type(self, columns: slice) -> KeptType | None:
        """Return how these columns are kept, if groups are and they are whole ones."""
        return MXFP4 if self.keeps_blocks and is_kept(MXFP4, columns) else None

    def blocks(self, rows: slice, columns: slice) -> Iterator[Parts]:
        """Yield codes (R, C) uint8 and scales (R, G) uint8 of rows, few at a time.

        Columns are those of the groups that overlap them. Raises CheckpointError.
        """
        header = self.header
        assert header.scale is not None
        groups = slice(columns.start // GROUP, ceil_div(columns.stop, GROUP))
        step = max(1, _CHUNK_CODES // (GROUP * max(1, groups.stop - groups.start)))
        for start in range(rows.start, rows.stop, step):
            own = header.stored_rows(slice(start, min(start + step, rows.stop)))
            index = header.expert, own, groups
            raw = self.reader.read(header.stack, index)[:: header.step]  # (R, G, bytes)
            codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)
            scales = self.reader.read(header.scale, index)[:: header.step]
            if bool((scales > MAX_E8M0).any()):
                raise self.scale_error()
            yield {"codes": codes, "sub": scales}
