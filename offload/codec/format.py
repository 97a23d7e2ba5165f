"""Which bits of a 16-bit element stay on the device, and which wait on the host: numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.dtypes import dtype_name

# Of a layer's elements, those that its list of outliers has room for. SmolLM2 needs half of it
# (docs/memory.md).
OUTLIER_SHARE = 1 / 512
OUTLIER_BYTES = 6  # a place of 32 bits, and the element
SPLIT_TOKENS = 256  # that are split at a time
SPLIT_BYTES = 32  # that splitting holds at a time, an element


@dataclass(frozen=True)
class SplitFormat:
    """How an element is cut: its code has the upper 8 bits of it, or rather of what is near.

    In a buffer of slices a plane (Hkv, tokens, D) has a byte for each element of keys or values.
    """

    low_bits: int  # that a code lacks
    min_code: int  # code of a magnitude; those below are zero or subnormal
    max_code: int  # code of a magnitude; those above are infinite or no number
    code_planes: int = 2  # keys and values

    @property
    def low_planes(self) -> int:
        """Return in how many planes the low bits are; in a single one, keys and values share it."""
        return self.low_bits // 4

    @property
    def planes(self) -> int:
        """Return in how many planes whole elements are."""
        return self.code_planes + self.low_planes


_FORMATS = {
    "bfloat16": SplitFormat(low_bits=4, min_code=0x08, max_code=0x7E),  # codes are e4m3fn
    "float16": SplitFormat(low_bits=8, min_code=0x00, max_code=0x7B),  # codes are e5m2
}

SPLIT_DTYPES = tuple(_FORMATS)


def split_format(dtype: Any) -> SplitFormat | None:
    """Return how elements of a dtype are cut; None where they are not."""
    return _FORMATS.get(dtype_name(dtype))
