"""The KV of one layer on disk: a file of its own, with a checksum for every piece of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.attention.head_major import token_slice
from offload.errors import CorruptCacheError
from offload.layout import KVLayout
from offload.memory.link import Copy
from offload.regular_files import UnsuitableFileError, open_regular

BLOCK_TOKENS = 4096  # of a head: what a checksum is of

# returns the tokens from one to another of a head, keys and values (2, T, D), in host memory
HostReader = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class KVBlock:
    """Some tokens of a head, in host memory."""

    head: int
    start: int  # the first of them
    kv: Tensor  # (2, T, D)


@dataclass(frozen=True)
class KVFile:
    """A file with the KV of `tokens` tokens in one layer, and nothing else.

    It has the pieces of each head in order, (2, T, D) each. Its checksums are CRC-32, in the order
    of the file; whoever writes it keeps them. They begin with `seed`, by which whoever writes it
    ties them to the text: KV of another text of the same length does not match them.
    """

    path: Path
    layout: KVLayout
    tokens: int
    seed: int = 0  # 32 bits

    @property
    def nbytes(self) -> int:
        return self.layout.bytes(self.tokens, 1)

    @property
    def blocks(self) -> int:
        """Return how many pieces it has, and so how many checksums."""
        return len(self._ends()) * self.layout.heads

    def write(self, excerpt: HostReader) -> list[int]:
        """Write the file, to the disk itself, and return its checksums. Raises OSError."""
        checksums = []
        with self.path.open("xb") as file:
            for head in range(self.layout.heads):
                for start, end in self._ends():
                    raw = _bytes_of(excerpt(head, start, end))
                    checksums.append(zlib.crc32(raw, self.seed))
                    file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        return checksums

    def readers(self, tokens: int, checksums: Sequence[int]) -> Iterator[Callable[[], KVBlock]]:
        """Yield what read the first tokens, a piece each, in any order and from any thread.

        They raise CorruptCacheError where the file is not what was written, and OSError.
        """
        if len(checksums) != self.blocks:
            raise CorruptCacheError(f"{self.path.name} has {len(checksums)} checksums")
        rest = iter(checksums)
        for head in range(self.layout.heads):
            for start, end in self._ends():
                checksum = next(rest)
                if start >= tokens:
                    continue
                yield _Reader(self, head, start, end, min(end, tokens), checksum)

    def _ends(self) -> list[tuple[int, int]]:
        """Return the first token of each piece of a head, and the one behind it."""
        starts = range(0, self.tokens, BLOCK_TOKENS)
        return [(start, min(start + BLOCK_TOKENS, self.tokens)) for start in starts]


@dataclass(frozen=True)
class _Reader:
    """Reads a piece, of which the tokens up to `last` are wanted."""

    file: KVFile
    head: int
    start: int
    end: int
    last: int
    checksum: int

    def __call__(self) -> KVBlock:
        file, layout = self.file, self.file.layout
        kv = torch.empty((2, self.end - self.start, layout.head_dim), dtype=layout.dtype)
        raw = _bytes_of(kv)
        per_token = layout.layer_token_bytes // layout.heads
        try:
            opened = open_regular(file.path)
        except UnsuitableFileError as error:
            raise CorruptCacheError(f"{file.path.name} is no regular file") from error
        with opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.nbytes:
                raise CorruptCacheError(f"{file.path.name} has {size} of {file.nbytes} bytes")
            opened.seek((self.head * file.tokens + self.start) * per_token)
            opened.readinto(raw)
        # what is checked is what is used: not what the disk may say another time
        if zlib.crc32(raw, file.seed) != self.checksum:
            raise CorruptCacheError(f"{file.path.name} is not what was written")
        return KVBlock(self.head, self.start, token_slice(kv, 0, self.last - self.start))


def copies_to(kv: Tensor, piece: KVBlock) -> list[Copy]:
    """Return the copies that take a piece to where it stands in kv (2, Hkv, N, D)."""
    end = piece.start + piece.kv.shape[1]
    place = token_slice(kv[:, piece.head], piece.start, end)
    return list(zip(place, piece.kv, strict=True))


def head_blocks(kv: Tensor) -> Iterator[KVBlock]:
    """Yield the heads of a layer (2, Hkv, T, D) in host memory."""
    for head in range(kv.shape[1]):
        yield KVBlock(head, 0, kv[:, head])


def _bytes_of(kv: Tensor) -> memoryview:
    """Return the memory of a piece (2, T, D), or a copy of it where it does not lie in order."""
    return kv.flatten().view(torch.uint8).numpy().data
