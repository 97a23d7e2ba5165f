"""Quantised formats as planes: each property of a block in an array of its own.

A file stores block after block, with scales between the codes. In planes, the codes of a row are
contiguous and aligned, and one expression describes every format:

    weight = value(code) * scale * group scale + minimum * group minimum

in float32, where all products are exact: a scale has 11 significant bits, a group scale at most 8,
a value at most 8, and their sum never exceeds 24. So a weight has the bits of gguf's dequantiser in
any order of operations. Does not import torch, since a plan has to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout import ceil_div
from parallel.formats.gguf_tensors import CODEBOOK_TYPES

GROUP = 32  # weights of a row that are stored together; a matrix may be cut between groups
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, as ggml has them


@dataclass(frozen=True)
class PlaneFormat:
    """The planes of a format, and how a weight is made from them."""

    name: str  # ggml's
    bits: int  # bits per code: 4, 5, 6, or 8 with a sign
    offset: int = 0  # subtracted from the code, if `values` is empty
    values: tuple[int, ...] = ()  # values of the codes
    scale_groups: int = 1  # groups that share a float16 scale (and minimum); 0 without a scale
    sub: int = 0  # weights that share a group scale: 16, 32, or 0 without one
    sub_kind: str = "int8"  # int8 or uint8; or e8m0 or ue4m3, a byte that is a float
    has_minimum: bool = False  # with a group minimum, uint8, where there is a group scale

    @property
    def has_float_subs(self) -> bool:
        """Return whether a group scale is a byte that is a float."""
        return self.sub_kind in ("e8m0", "ue4m3")

    def row_bytes(self, first: int, last: int) -> int:
        """Return the bytes of a row's columns from `first` to `last`, multiples of GROUP.

        A block that they cut adds its scale nevertheless.
        """
        per_scale = self.scale_groups * GROUP
        scales = ceil_div(last, per_scale) - first // per_scale if per_scale else 0
        subs = (last - first) // self.sub if self.sub else 0
        scale_bytes = (2 * scales + subs) * (2 if self.has_minimum else 1)
        return (last - first) * self.bits // 8 + scale_bytes


PLANE_FORMATS = {
    each.name: each
    for each in (
        PlaneFormat("Q4_0", 4, offset=8),
        PlaneFormat("Q4_1", 4, has_minimum=True),
        PlaneFormat("Q5_0", 5, offset=16),
        PlaneFormat("Q5_1", 5, has_minimum=True),
        PlaneFormat("Q8_0", 8),
        PlaneFormat("Q4_K", 4, scale_groups=8, sub=32, sub_kind="uint8", has_minimum=True),
        PlaneFormat("Q5_K", 5, scale_groups=8, sub=32, sub_kind="uint8", has_minimum=True),
        PlaneFormat("Q6_K", 6, offset=32, scale_groups=8, sub=16),
        PlaneFormat("IQ4_NL", 4, values=IQ4_VALUES),
        PlaneFormat("IQ4_XS", 4, values=IQ4_VALUES, scale_groups=8, sub=32),
        PlaneFormat("MXFP4", 4, values=E2M1_VALUES, scale_groups=0, sub=32, sub_kind="e8m0"),
        PlaneFormat("NVFP4", 4, values=E2M1_VALUES, scale_groups=0, sub=16, sub_kind="ue4m3"),
    )
}


def kept_unit(name: str) -> int | None:
    """Return the number of columns of which a kept matrix of a ggml type has a multiple.

    None if such matrices are read as numbers.
    """
    if name in PLANE_FORMATS:
        return GROUP
    return CODEBOOK_TYPES[name].numbers if name in CODEBOOK_TYPES else None


def is_kept(name: str, columns: slice) -> bool:
    """Return whether a rank's columns of a matrix of a ggml type are kept: they cut no unit."""
    unit = kept_unit(name)
    return unit is not None and not (columns.start % unit or columns.stop % unit)


def kept_row_bytes(name: str, columns: slice) -> int:
    """Return the bytes of these columns of a row of a type that is kept."""
    if name in PLANE_FORMATS:
        return PLANE_FORMATS[name].row_bytes(columns.start, columns.stop)
    kind = CODEBOOK_TYPES[name]
    return (columns.stop - columns.start) // kind.numbers * kind.nbytes
