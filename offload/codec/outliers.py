"""The elements of a layer that no code holds, kept as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

_NO_POSITION = 2**31 - 1  # behind all places
_MAX_PENDING = 64  # pieces that wait to be put in order: each takes a block of the allocator


@dataclass(frozen=True)
class SparseValues:
    """Some elements of the keys, or of the values, of one head."""

    positions: Tensor  # (n,) int32: token * D + dimension
    patterns: Tensor  # (n,) int16

    @classmethod
    def concatenated(cls, pieces: Sequence[SparseValues]) -> SparseValues:
        """Return the elements of all pieces, one after the other."""
        places = torch.cat([piece.positions for piece in pieces])
        return cls(places, torch.cat([piece.patterns for piece in pieces]))

    def outside(self, start: int, end: int) -> SparseValues:
        """Return those in places before `start` and from `end` on."""
        stays = (self.positions < start) | (self.positions >= end)
        return SparseValues(self.positions[stays], self.patterns[stays])


class Outliers:
    """Some elements of a layer (2, Hkv, capacity, D), on the device.

    They are in the order of keys and values, heads, and places in a head: in as many lists. What
    comes is put into that order when it is asked for, or much has come: ordering waits for the
    device. Where there are more than was planned for, the memory for them grows.
    """

    def __init__(self, room: int, heads: int, device: torch.device):
        """Make room for `room` elements of a layer with `heads` KV heads."""
        self._heads = heads
        self._device = device
        self._counts = [0] * (2 * heads)  # by keys and values, then heads
        self._tokens = 0  # that were looked at
        self._pending: list[
            tuple[Tensor, SparseValues]
        ] = []  # in no order yet, each with its list (n,)
        self._allocate(room)

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

    def append(self, kv: Tensor, chosen: Tensor, start: int) -> None:
        """Keep what is `chosen` of kv (2, Hkv, T, D), the tokens from `start` on.

        What was kept of these tokens is forgotten. Raises torch.OutOfMemoryError where the device
        cannot hold them.
        """
        tokens, dim = kv.shape[2:]
        if start < self._tokens:  # they are written again
            self._remove(start * dim, (start + tokens) * dim)
        self._tokens = max(self._tokens, start + tokens)
        part, head, token, dimension = chosen.nonzero().unbind(1)
        patterns = kv.view(torch.int16)[part, head, token, dimension]
        places = ((start + token) * dim + dimension).int()
        self._pending.append((part * self._heads + head, SparseValues(places, patterns)))
        if len(self._pending) == _MAX_PENDING:
            self.sort()

    def sort(self) -> None:
        """Add to each list what has come of it; what came later has later places."""
        if not self._pending:
            return
        every, pieces = zip(*self._pending, strict=True)
        self._pending = []
        lists = torch.cat(every)
        order = lists.argsort(stable=True)
        sizes = lists.bincount(minlength=2 * self._heads).tolist()
        come = SparseValues.concatenated(pieces)
        more = map(
            SparseValues, come.positions[order].split(sizes), come.patterns[order].split(sizes)
        )
        self._replace([[old, new] for old, new in zip(self._by_head(), more, strict=True)])

    def truncate(self, tokens: int, dim: int) -> None:
        """Keep those of the first `tokens` tokens, of `dim` dimensions, and no others."""
        self._tokens = min(self._tokens, tokens)
        self._remove(tokens * dim, _NO_POSITION)

    def apply(self, out: Tensor, head: int, heads: int) -> None:
        """Write to the first heads of out (2, h, capacity, D) those from `head` on."""
        kept = self._by_head()
        for part in range(2):
            first = part * self._heads + head
            for index, own in enumerate(kept[first : first + heads]):
                out[part, index].view(-1).view(torch.int16)[own.positions.long()] = own.patterns

    def _remove(self, start: int, end: int) -> None:
        """Forget what is kept of the places from `start` to `end`."""
        self._replace([[kept.outside(start, end)] for kept in self._by_head()])

    def _by_head(self) -> list[SparseValues]:
        """Return what is kept of keys and values, by head."""
        self.sort()
        total = sum(self._counts)
        places = self._positions[:total].split(self._counts)
        patterns = self._patterns[:total].split(self._counts)
        return list(map(SparseValues, places, patterns))

    def _replace(self, lists: list[list[SparseValues]]) -> None:
        """Keep this and nothing else: the pieces of each list."""
        joined = SparseValues.concatenated(list(chain(*lists)))
        total = len(joined.positions)
        if total > len(self._positions):
            self._allocate(2 * total)
        self._positions[:total] = joined.positions
        self._patterns[:total] = joined.patterns
        self._counts = [sum(len(piece.positions) for piece in own) for own in lists]

    def _allocate(self, room: int) -> None:
        self._positions = torch.empty(room, dtype=torch.int32, device=self._device)
        self._patterns = torch.empty(room, dtype=torch.int16, device=self._device)
