"""One layer's KV on disk: a file of its own, with a checksum for every block."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from offload.attention.head_major import token_slice
from offload.errors import CorruptCacheError
from offload.layout import KVLayout, Segment
from offload.memory.host import allocate
from offload.memory.link import Copy
from offload.regular_files import UnsuitableFileError, open_regular

BLOCK_TOKENS = 4096  # tokens of a head per checksum


@dataclass(frozen=True)
class HostReader:
    """Reads a layer's KV to host memory."""

    read: Callable[[int, int, int], Tensor]
    segments: Sequence[Segment] = ()  # the tokens that a layer with a window holds

    def __call__(self, head: int, start: int, end: int) -> Tensor:
        """Return the keys and values (2, T, D) of a head's tokens from `start` to `end`."""
        return self.read(head, start, end)


@dataclass(frozen=True)
class KVBlock:
    """Consecutive tokens of one head, in host memory."""

    head: int
    start: int  # first token
    kv: Tensor  # (2, T, D)


@dataclass(frozen=True)
class KVFile:
    """A file with the KV of one layer's tokens from `first` to `tokens`, and nothing else.

    It has each head's blocks in order, (2, T, D) each. The checksums are CRC-32 in file order; the
    writer keeps them. They start from `seed`, by which the writer ties them to a prompt: KV of
    another prompt of the same length does not match.
    """

    path: Path
    layout: KVLayout
    tokens: int
    seed: int = 0  # 32 bits
    first: int = 0  # the first token in the file

    @property
    def nbytes(self) -> int:
        return self.layout.bytes(self.tokens - self.first, 1)

    @property
    def blocks(self) -> int:
        """Return the number of blocks, and so of checksums."""
        return len(self._block_bounds()) * self.layout.heads

    def write(self, read: HostReader) -> list[int]:
        """Write and fsync the file, and return its checksums. Raises OSError."""
        checksums = []
        with self.path.open("xb") as file:
            for head in range(self.layout.heads):
                for start, end in self._block_bounds():
                    data = _bytes_of(read(head, start, end))
                    checksums.append(zlib.crc32(data, self.seed))
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return checksums

    def readers(self, tokens: int, checksums: Sequence[int]) -> Iterator[Callable[[], KVBlock]]:
        """Yield a reader of each block of the first tokens, callable in any order from any thread.

        A reader raises CorruptCacheError if the file is not what was written, and OSError.
        """
        if len(checksums) != self.blocks:
            raise CorruptCacheError(
                f"{self.path.name} has {self.blocks} blocks, but {len(checksums)} checksums"
            )
        remaining = iter(checksums)
        for head in range(self.layout.heads):
            for start, end in self._block_bounds():
                checksum = next(remaining)
                if start >= tokens:
                    continue
                yield _Reader(self, head, start, end, min(end, tokens), checksum)

    def _block_bounds(self) -> list[tuple[int, int]]:
        """Return each block's first token, and the end of the block."""
        starts = range(self.first, self.tokens, BLOCK_TOKENS)
        return [(start, min(start + BLOCK_TOKENS, self.tokens)) for start in starts]


@dataclass(frozen=True)
class _Reader:
    """Reads a block, and returns its tokens up to `end_read`."""

    file: KVFile
    head: int
    start: int
    end: int
    end_read: int
    checksum: int

    def __call__(self) -> KVBlock:
        file, layout = self.file, self.file.layout
        shape = (layout.planes, self.end - self.start, layout.head_dim)
        kv = torch.empty(shape, dtype=layout.dtype)
        data = _bytes_of(kv)
        per_token = layout.bytes(1, 1) // layout.heads
        try:
            stream = open_regular(file.path)
        except UnsuitableFileError as error:
            raise CorruptCacheError(f"{file.path.name} is not a regular file") from error
        with stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.nbytes:
                raise CorruptCacheError(f"{file.path.name} has {size} of {file.nbytes} bytes")
            tokens = self.head * (file.tokens - file.first) + self.start - file.first
            stream.seek(tokens * per_token)
            stream.readinto(data)
        # the bytes checked are those used: a second read may return others
        if zlib.crc32(data, file.seed) != self.checksum:
            raise CorruptCacheError(f"{file.path.name} does not match its checksum")
        return KVBlock(self.head, self.start, token_slice(kv, 0, self.end_read - self.start))


def copies_to(kv: Tensor, block: KVBlock) -> list[Copy]:
    """Return the copies that put a block at its position in kv (2, Hkv, N, D)."""
    end = block.start + block.kv.shape[1]
    destination = token_slice(kv[:, block.head], block.start, end)
    return list(zip(destination, block.kv, strict=True))


def read_segments(
    parts: Sequence[tuple[Segment, Tensor]], head: int, start: int, end: int
) -> Tensor:
    """Return a head's tokens (2, T, D) of that part (2, Hkv, N, D) which has them all."""
    for segment, kv in parts:
        if segment.start <= start and end <= segment.end:
            return token_slice(kv[:, head], start - segment.start, end - segment.start)
    raise ValueError(f"the tokens from {start} to {end} are not held")


def read_layer(read: HostReader, layout: KVLayout, segment: Segment) -> Tensor:
    """Return a copy (2, Hkv, T, D) of a layer's tokens in host memory.

    Raises InsufficientMemoryError.
    """
    start, end = segment
    _, *shape = layout.shape(1, end - start)
    copy = allocate(prod(shape), layout.dtype).view(shape)
    for head in range(layout.heads):
        copy[:, head].copy_(read(head, start, end))
    return copy


def _bytes_of(kv: Tensor) -> memoryview:
    """Return the memory of a block (2, T, D), or of a copy if it is not contiguous."""
    return kv.flatten().view(torch.uint8).numpy().data
