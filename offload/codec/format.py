"""The split format: which bits of a 16-bit element stay on the device, which in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.dtypes import dtype_name

# Share of a layer's elements that its outlier list has room for. SmolLM2 needs half of it
# (docs/memory.md).
OUTLIER_SHARE = 1 / 512
OUTLIER_BYTES = 6  # a 32-bit position and the element
SPLIT_TOKENS = 1024  # tokens split at a time by a kernel
UNREAD_BLOCKS = 4  # as many blocks have outliers that the host has not counted yet
PLAIN_SPLIT_TOKENS = 256  # and by plain operations, which need more memory per element
SPLIT_BYTES = 32  # working memory of plain operations, per element


@dataclass(frozen=True)
class SplitFormat:
    """How an element is split: its high byte holds the upper 8 bits of the rounded element.

    A buffer of split elements consists of planes (Hkv, tokens, D) of one byte per element.
    """

    low_bits: int  # bits that the high byte lacks
    min_high: int  # smallest magnitude of a high byte; below are zeros and subnormals
    max_high: int  # largest magnitude of a high byte; above are infinities and NaNs
    high_planes: int = 2  # keys and values

    @property
    def low_planes(self) -> int:
        """Return the number of planes of low bits; keys and values share a single one."""
        return self.low_bits // 4

    @property
    def half(self) -> int:
        """Return half of the range of low bits, which rounding to high bytes adds."""
        return 1 << (self.low_bits - 1)

    def low_key_bytes(self, dim: int) -> int:
        """Return the bytes of the low bits of a key with `dim` elements, an even number."""
        return dim * self.low_bits // 8

    @property
    def planes(self) -> int:
        """Return the number of planes of whole elements."""
        return self.high_planes + self.low_planes


_FORMATS = {
    "bfloat16": SplitFormat(low_bits=4, min_high=0x08, max_high=0x7E),  # e4m3fn high bytes
    "float16": SplitFormat(low_bits=8, min_high=0x00, max_high=0x7B),  # e5m2 high bytes
}

SPLIT_DTYPES = tuple(_FORMATS)


def compression_saves(dtype: Any) -> bool:
    """Return whether split floats take less memory than the elements of a dtype themselves."""
    split = split_format(dtype)
    return split is not None and split.planes < 2 * dtype.itemsize


def split_format(dtype: Any) -> SplitFormat | None:
    """Return the split format of a dtype, or None if its elements cannot be split."""
    return _FORMATS.get(dtype_name(dtype))
