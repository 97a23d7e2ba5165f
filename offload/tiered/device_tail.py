"""The device tail of an offloaded layer: the tokens after its boundary."""

from __future__ import annotations

from torch import Tensor

from offload.attention.head_major import token_slice, write_tokens
from offload.memory.link import Link


class DeviceTail:
    """The tokens after a layer's boundary, in a device buffer `kv` (2, Hkv, capacity, D)."""

    def __init__(self, kv: Tensor):
        self.kv = kv

    def tokens(self, count: int) -> Tensor:
        """Return the first `count` tokens (2, Hkv, count, D), as a view."""
        return token_slice(self.kv, 0, count)

    def append(self, k: Tensor, v: Tensor, at: int) -> None:
        """Write k and v (T, Hkv, D) to the slots from `at` on."""
        write_tokens(self.kv, k, v, at)

    def shift(self, count: int, remaining: int) -> None:
        """Drop the first `count` tokens, and move the `remaining` after them to the start."""
        rest_kv = token_slice(self.kv, count, count + remaining).clone()
        self.tokens(remaining).copy_(rest_kv)

    def store(self, kv: Tensor, start: int, boundary: int) -> Tensor:
        """Store those tokens of kv (2, Hkv, T, D), from `start` on, that follow the boundary.

        Returns the tokens before the boundary (2, Hkv, n, D), as a view.
        """
        tokens = kv.shape[2]
        count = min(tokens, max(0, boundary - start))
        if count < tokens:
            at = start + count - boundary
            token_slice(self.kv, at, at + tokens - count).copy_(token_slice(kv, count, tokens))
        return token_slice(kv, 0, count)

    def load(self, kv: Tensor, length: int, boundary: int) -> None:
        """Copy the tokens from the boundary to `length` to their positions in kv (2, Hkv, N, D)."""
        token_slice(kv, boundary, length).copy_(self.tokens(length - boundary))

    def copy_to_host(self, count: int, link: Link) -> Tensor:
        """Return a copy of the first tokens (2, Hkv, count, D), unaffected by later writes."""
        return link.read_to_host(self.tokens(count)).clone()
