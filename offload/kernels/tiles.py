"""What several modules of fused kernels share: sizes of tiles, and decoding of split floats.

Importing this needs triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

FEW_ROWS = 16  # smallest block of rows
_KEYS = 64  # keys per tile, of which larger heads have half
_WIDE = 256  # columns of a head up to which tiles are of full size
_STAGED_DIM, _STAGED = 128, 32 * 128  # largest head and largest block with prefetched tiles
_STAGED_LOW_BITS = 16 * 128  # largest block with prefetched tiles of low bits, too
# triton's interpreter, which tests use, would multiply bfloat16 as integers
UPCAST = os.environ.get("TRITON_INTERPRET") == "1"


def tile_sizes(columns: int) -> tuple[int, int]:
    """Return the most rows of a program, and the keys of a tile, for heads of this size."""
    return (64, _KEYS) if columns <= _WIDE else (16, _KEYS // 2)


def launch_options(rows: int, columns: int, *, has_low_bits: bool = False) -> dict[str, int]:
    """Return the number of key tiles in flight, and of warps, for a program of this size.

    Few rows alone leave room to prefetch low bits of selected keys, too, if there are any.
    Shared memory is 100 KB on an RTX 3090 or 4090: enough for two programs at a time up to head
    dimension 128, and for one above. Few rows are fastest like this on an H200 (docs/log.md).
    """
    staged = _STAGED_LOW_BITS if has_low_bits else _STAGED
    if rows * columns > staged or columns > _STAGED_DIM:
        return {"num_stages": 1, "num_warps": 4}
    return {"num_stages": 2, "num_warps": 2 if rows == FEW_ROWS else 4}


@triton.jit
def bit_patterns(high_byte, low_bits, constant, LOW_BITS: tl.constexpr):
    """Return the int16 patterns of elements: y, of high byte and low bits, plus a constant."""
    MASK: tl.constexpr = (0x7F << LOW_BITS) - (1 << 15)  # bits of the high byte in y
    y = high_byte.to(tl.int8, bitcast=True).to(tl.int32) << LOW_BITS
    y = (y & MASK) | low_bits
    return (y + constant).to(tl.int16)
