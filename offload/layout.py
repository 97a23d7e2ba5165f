"""The shape of a KV cache: everything that the memory tiers need to know about a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def shares(count: int, parts: int) -> list[int]:
    """Split `count` into `parts` nearly equal integers, spread evenly."""
    ends = [part * count // parts for part in range(parts + 1)]
    return [end - start for start, end in pairwise(ends)]


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class KVLayout:
    """The KV geometry of one rank. `heads` are the *local* KV heads."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    groups: int = 1  # query heads per KV head

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} must be at least 1, found {getattr(self, name)}")

    @property
    def layer_token_bytes(self) -> int:
        """Return the bytes of one token's keys and values in one layer on this rank."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    def bytes(self, tokens: int, layers: int | None = None) -> int:
        """Return the bytes of `tokens` tokens in `layers` layers, all of them by default."""
        return tokens * self.layer_token_bytes * (self.layers if layers is None else layers)

    def shape(self, layers: int, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of head-major storage: (layers, keys and values, Hkv, tokens, D).

        A head's prefix is one contiguous copy.
        """
        return layers, 2, self.heads, tokens, self.head_dim
