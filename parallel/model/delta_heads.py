"""Where a checkpoint has the rows of a rank's heads of a gated delta net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.layout import RecurrentShape

# Qwen3-Next stacks these projections by key head, others have each by itself
STACKS = {"qkvz": ("qkv", "z"), "ba": ("b", "a")}


@dataclass(frozen=True)
class HeadRows:
    """The rows of some consecutive key heads, and of the value heads that share them."""

    shape: RecurrentShape  # with the heads of the whole model
    first: int  # key head
    last: int

    @property
    def channels(self) -> list[slice]:
        """The rows of queries, keys and values, stacked in this order."""
        shape, keys = self.shape, self.shape.key_heads * self.shape.key_dim
        own = slice(self.first * shape.key_dim, self.last * shape.key_dim)
        of_keys = slice(keys + own.start, keys + own.stop)
        return [own, of_keys, *self.values(shape.value_dim, 2 * keys)]

    def values(self, size: int, start: int = 0) -> list[slice]:
        """Return the rows of value heads, which have `size` rows each, from row `start` on."""
        shape = self.shape
        if not shape.is_tiled or self.last - self.first == shape.key_heads:
            return [_slice(start, size, self.first * shape.shared, self.last * shape.shared)]
        tiles = range(0, shape.value_heads, shape.key_heads)
        return [_slice(start, size, tile + self.first, tile + self.last) for tile in tiles]

    def inputs(self, name: str) -> tuple[int, list[slice]]:
        """Return the height of a projection's tensor in_proj_NAME, and the rows in it."""
        shape, own = self.shape, self.shape.shared * self.shape.value_dim
        if name == "qkv":
            return shape.channels, self.channels
        if name == "z":
            return shape.value_heads * shape.value_dim, self.values(shape.value_dim)
        if name == "qkvz":
            return self._by_head([shape.key_dim, shape.key_dim, own, own])
        if name == "ba":
            return self._by_head([shape.shared, shape.shared])
        return shape.value_heads, self.values(1)

    def _by_head(self, sizes: Sequence[int]) -> tuple[int, list[slice]]:
        """Return height and rows of a tensor that stacks parts of these sizes of each key head."""
        height, rows, before = sum(sizes), list[slice](), 0
        for size in sizes:
            starts = (head * height + before for head in range(self.first, self.last))
            rows += [slice(start, start + size) for start in starts]
            before += size
        return self.shape.key_heads * height, rows


def _slice(start: int, size: int, first: int, last: int) -> slice:
    """Return the rows of heads, which have `size` rows each, from row `start` on."""
    return slice(start + first * size, start + last * size)
