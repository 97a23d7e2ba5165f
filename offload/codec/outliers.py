"""Outliers: the elements of a layer outside the range of high bytes, stored unchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from offload.codec.format import UNREAD_BLOCKS

_NO_POSITION = 2**31 - 1  # greater than all positions
_MAX_PENDING = 64  # unsorted pieces: each takes a block of the allocator


ReadLater = Callable[[Tensor], Callable[[], Tensor]]


def _read_now(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


class _Block(NamedTuple):
    """Tokens whose outliers are still to be read."""

    kv: Tensor  # (2, Hkv, T, D)
    mask: Tensor  # likewise, bool
    start: int  # position of the first one
    counts: Callable[[], Tensor]  # returns how many each list gets, (2 * Hkv,)


@dataclass(frozen=True)
class SparseValues:
    """Some elements of the keys, or of the values, of one head: positions and bit patterns."""

    positions: Tensor  # (n,) int32: token * D + dimension
    patterns: Tensor  # (n,) int16

    @classmethod
    def concatenated(cls, pieces: Sequence[SparseValues]) -> SparseValues:
        """Return the elements of all pieces, concatenated."""
        positions = torch.cat([piece.positions for piece in pieces])
        return cls(positions, torch.cat([piece.patterns for piece in pieces]))

    def outside(self, start: int, end: int) -> SparseValues:
        """Return the elements at positions before `start` and from `end` on."""
        outside = (self.positions < start) | (self.positions >= end)
        return SparseValues(self.positions[outside], self.patterns[outside])


class Outliers:
    """Outliers of a layer (2, Hkv, capacity, D), on the device.

    There is a list for the keys and one for the values of each head, sorted by position. New
    elements are sorted on access, or once many are pending. How many of a block are outliers is
    read a few blocks later, so that the host need not wait for the device. The memory grows if
    there are more than planned for.
    """

    def __init__(
        self, capacity: int, heads: int, device: torch.device, read_later: ReadLater = _read_now
    ):
        """Allocate memory for `capacity` elements of a layer with `heads` KV heads.

        `read_later` is the link's (`Link.read_later`).
        """
        self._heads = heads
        self._device = device
        self._read_later = read_later
        self._unread = deque[_Block]()
        self._counts = [0] * (2 * heads)  # lengths of the lists: keys by head, then values
        self._starts: Tensor | None = None  # first element of each, and their end, for a kernel
        self._tokens = 0  # tokens seen so far
        # list indices (n,), elements, and how many each list gets
        self._pending: list[tuple[Tensor, SparseValues, list[int]]] = []
        self._allocate(capacity)

    @property
    def nbytes(self) -> int:
        return self._positions.nbytes + self._patterns.nbytes

    def to_host(self) -> Outliers:
        """Return a copy in host memory."""
        self.sort()
        total = sum(self._counts)
        copy = Outliers(total, self._heads, torch.device("cpu"))
        copy._tokens, copy._counts = self._tokens, list(self._counts)
        copy._positions.copy_(self._positions[:total])
        copy._patterns.copy_(self._patterns[:total])
        return copy

    def append(self, kv: Tensor, mask: Tensor, start: int) -> None:
        """Store the elements of kv (2, Hkv, T, D), tokens from `start` on, that `mask` selects.

        They replace the outliers of these tokens. kv must not change before `sort`. Raises
        torch.OutOfMemoryError if the device cannot hold them.
        """
        tokens, dim = kv.shape[2:]
        if start < self._tokens:  # tokens that are overwritten
            self._remove(start * dim, (start + tokens) * dim)
        self._tokens = max(self._tokens, start + tokens)
        counts = self._read_later(mask.flatten(0, 1).flatten(1).sum(1))
        self._unread.append(_Block(kv, mask, start, counts))
        if len(self._unread) > UNREAD_BLOCKS:
            self._read_block()
        if len(self._pending) >= _MAX_PENDING:
            self._sort_pending()

    def sort(self) -> None:
        """Read what is left of the KV that was passed to `append`, and move elements to lists.

        Those that are appended later have greater positions.
        """
        while self._unread:
            self._read_block()
        self._sort_pending()

    def _read_block(self) -> None:
        """Read the outliers of the oldest block that is left."""
        kv, mask, start, read_counts = self._unread.popleft()
        counts = read_counts().tolist()
        found = mask.nonzero_static(size=sum(counts))  # `nonzero` would wait for the device
        part, head, token, dimension = found.unbind(1)
        patterns = kv.view(torch.int16)[part, head, token, dimension]
        positions = ((start + token) * kv.shape[3] + dimension).int()
        values = SparseValues(positions, patterns)
        self._pending.append((part * self._heads + head, values, counts))

    def _sort_pending(self) -> None:
        if not self._pending:
            return
        indices, pieces, counts = zip(*self._pending, strict=True)
        self._pending = []
        order = torch.cat(indices).argsort(stable=True)
        sizes = [sum(each) for each in zip(*counts, strict=True)]
        elements = SparseValues.concatenated(pieces)
        positions = elements.positions[order].split(sizes)
        patterns = elements.patterns[order].split(sizes)
        added = map(SparseValues, positions, patterns)
        self._replace([[old, new] for old, new in zip(self._lists(), added, strict=True)])

    def truncate(self, tokens: int, dim: int) -> None:
        """Keep only the outliers of the first `tokens` tokens, of `dim` dimensions each."""
        self._tokens = min(self._tokens, tokens)
        self._remove(tokens * dim, _NO_POSITION)

    def apply(self, out: Tensor, head: int, heads: int, kernels: ModuleType | None = None) -> None:
        """Write the outliers of `heads` heads, from `head` on, to out (2, h, capacity, D).

        In one launch if there are `kernels`, `offload.kernels.split_float`.
        """
        self.sort()
        if kernels is not None:
            if self._starts is None:
                starts = list(accumulate(self._counts, initial=0))
                self._starts = torch.tensor(starts, dtype=torch.int32, device=self._device)
            longest = max(self._counts)
            elements = (self._positions, self._patterns, self._starts)
            kernels.write_outliers(*elements, longest, out[:, :heads], head)
            return
        lists = self._lists()
        for part in range(2):
            first = part * self._heads + head
            for index, values in enumerate(lists[first : first + heads]):
                patterns = out[part, index].view(-1).view(torch.int16)
                patterns[values.positions.long()] = values.patterns

    def _remove(self, start: int, end: int) -> None:
        """Remove the outliers at positions from `start` to `end`."""
        self.sort()
        self._replace([[values.outside(start, end)] for values in self._lists()])

    def _lists(self) -> list[SparseValues]:
        """Return those that are in lists: the keys of each head, then the values of each."""
        total = sum(self._counts)
        positions = self._positions[:total].split(self._counts)
        patterns = self._patterns[:total].split(self._counts)
        return list(map(SparseValues, positions, patterns))

    def _replace(self, lists: list[list[SparseValues]]) -> None:
        """Replace the contents of all lists; each is given in pieces."""
        elements = SparseValues.concatenated(list(chain(*lists)))
        total = len(elements.positions)
        if total > len(self._positions):
            self._allocate(2 * total)
        self._positions[:total] = elements.positions
        self._patterns[:total] = elements.patterns
        self._counts = [sum(len(piece.positions) for piece in pieces) for pieces in lists]
        self._starts = None

    def _allocate(self, capacity: int) -> None:
        with torch.inference_mode(False):  # outliers are loaded outside of forwards, too
            self._positions = torch.empty(capacity, dtype=torch.int32, device=self._device)
            self._patterns = torch.empty(capacity, dtype=torch.int16, device=self._device)
