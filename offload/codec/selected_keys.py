"""The low bits of some keys of a split layer: with high bytes they are exact keys to draft from.

Of bfloat16 two elements' four bits share a byte: those of dimension i, and above them those of
dimension i + D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.codec.format import SplitFormat


@dataclass(frozen=True)
class SelectedKeys:
    """The keys of some chunks of a layer's tokens, different ones for each head."""

    format: SplitFormat
    lows: Tensor  # (Hkv, n * chunk, D * low_bits / 8) uint8
    chunks: Tensor  # (Hkv, n) int64: which chunk of the sequence each of them is
    places: Tensor  # (Hkv, C) int32: which of them a chunk of the sequence is; -1 if none
    chunk: int  # tokens of a chunk

    @property
    def nbytes(self) -> int:
        """Return the bytes of low bits."""
        return self.lows.nbytes

    def complete(self, keys: Tensor, head: int) -> None:
        """Make the selected ones of keys (h, N, D) exact, which were decoded from high bytes.

        They are those of the heads from `head` on. A decoded element has half of the range of its
        low bits in place of these, so that it is rounded. Outliers stay what they are, roughly.
        """
        for own, lows, chunks in zip(keys, self.lows[head:], self.chunks[head:], strict=False):
            added = unpack(self.format, lows).short().sub_(self.format.half)
            # in words: on a CPU adding in place, or copying 16 bits at a time, takes longer
            rows = own.view(torch.int32).view(-1, self.chunk * own.shape[1] // 2)
            selected = rows.index_select(0, chunks)
            selected.view(torch.int16).add_(added.view(len(chunks), -1))
            rows.index_copy_(0, chunks, selected)


def gather_chunks(x: Tensor, chunks: Tensor, chunk: int) -> Tensor:
    """Return the chunks (H, n) of x (..., H, N, D), one after the other (..., H, n * chunk, D)."""
    heads = torch.arange(len(chunks), device=x.device)[:, None]
    return x.unflatten(-2, (-1, chunk))[..., heads, chunks, :, :].flatten(-3, -2)


def pack(fmt: SplitFormat, keys: Tensor) -> Tensor:
    """Return the low bits (..., D * low_bits / 8) uint8 of keys (..., D).

    An offset of `SplitFloatCodec` does not change them: it is a multiple of their range.
    """
    lows = keys.view(torch.int16).add(fmt.half).bitwise_and_((1 << fmt.low_bits) - 1).byte()
    if fmt.low_bits == 8:
        return lows
    first, second = lows.chunk(2, dim=-1)
    return second.bitwise_left_shift(4).bitwise_or_(first)


def unpack(fmt: SplitFormat, lows: Tensor) -> Tensor:
    """Return the low bits (..., D) uint8 that `pack` made bytes of."""
    return lows if fmt.low_bits == 8 else torch.cat((lows & 0xF, lows >> 4), dim=-1)
