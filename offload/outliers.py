"""The elements of a layer that no code holds, kept as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Some elements of the keys, or of the values, of one head."""

    places: Tensor  # (n,) int32: token * D + dimension
    patterns: Tensor  # (n,) int16

    def before(self, end: int) -> Kept:
        """Return those in places before `end`."""
        stays = self.places < end
        return Kept(
            self.places[stays],
            self.patterns[stays],
        )

    def outside(self, start: int, end: int) -> Kept:
        """Return those in places before `start` and from `end` on."""
        stays = (self.places < start) | (self.places >= end)
        return Kept(
            self.places[stays],
            self.patterns[stays],
        )


class Outliers:
    """Some elements of a layer (2, Hkv, capacity, D), on the device.

    They are in the order of keys and values, heads, and places in a head. Where there are more than
    was planned for, the memory for them grows.
    """

    def __init__(self, room: int, heads: int, device: torch.device):
        """Make room for `room` elements of a layer with `heads` KV heads."""
        self._heads = heads
        self._device = device
        self._counts = [0] * (2 * heads)  # by keys and values, then heads
        self._tokens = 0  # that were looked at
        self._allocate(room)

    @property
    def nbytes(self) -> int:
        return self._places.nbytes + self._patterns.nbytes

    def on_host(self) -> Outliers:
        """Return a copy in host memory."""
        total = sum(self._counts)
        host = torch.device("cpu")
        copy = Outliers(total, self._heads, host)
        copy._tokens, copy._counts = self._tokens, list(self._counts)
        copy._places.copy_(self._places[:total])
        copy._patterns.copy_(self._patterns[:total])
        return copy

    def put(self, kv: Tensor, chosen: Tensor, start: int) -> None:
        """Keep what is `chosen` of kv (2, Hkv, T, D), the tokens from `start` on.

        What was kept of these tokens is forgotten. Raises torch.OutOfMemoryError where the device
        cannot hold them.
        """
        tokens, dim = kv.shape[2:]
        first = start * dim
        kept = self._kept()
        if start < self._tokens:  # they are written again
            kept = [each.outside(first, first + tokens * dim) for each in kept]
        self._tokens = max(self._tokens, start + tokens)
        by_head = chosen.flatten(2)  # (2, Hkv, T * D)
        counts = by_head.sum(-1).flatten().tolist()
        places = by_head.nonzero()[:, 2]
        places = places.int() + first
        patterns = kv.view(torch.int16)[chosen]
        merged = []
        for old, more, values in zip(
            kept,
            places.split(counts),
            patterns.split(counts),
            strict=True,
        ):
            merged += [old, Kept(more, values)]
        self._keep(merged)

    def forget(self, tokens: int, dim: int) -> None:
        """Keep those of the first `tokens` tokens, of `dim` dimensions, and no others."""
        self._tokens = min(self._tokens, tokens)
        end = tokens * dim
        pieces = []
        for kept in self._kept():
            pieces += [
                kept.before(end),
                kept.before(0),
            ]
        self._keep(pieces)

    def apply(self, out: Tensor, head: int, heads: int) -> None:
        """Write to the first heads of out (2, h, capacity, D) those from `head` on."""
        kept = self._kept()
        for part in range(2):
            first = part * self._heads + head
            for index, own in enumerate(kept[first : first + heads]):
                flat = out[part, index].view(-1)
                flat = flat.view(torch.int16)
                flat[own.places.long()] = own.patterns

    def _kept(self) -> list[Kept]:
        """Return what is kept of keys and values, by head."""
        total = sum(self._counts)
        places = self._places[:total].split(self._counts)
        patterns = self._patterns[:total].split(self._counts)
        return list(map(Kept, places, patterns))

    def _keep(self, pieces: list[Kept]) -> None:
        """Keep this and nothing else: two pieces for each head."""
        places = torch.cat([piece.places for piece in pieces])
        patterns = torch.cat([piece.patterns for piece in pieces])
        total = len(places)
        if total > len(self._places):
            self._allocate(2 * total)
        self._places[:total] = places
        self._patterns[:total] = patterns
        lengths = [len(piece.places) for piece in pieces]
        self._counts = list(map(sum, zip(lengths[::2], lengths[1::2], strict=True)))

    def _allocate(self, room: int) -> None:
        self._places = torch.empty(room, dtype=torch.int32, device=self._device)
        self._patterns = torch.empty(room, dtype=torch.int16, device=self._device)
