"""Quantised formats as planes: each property of a block in an array of its own.

A file stores block after block, with scales between the codes. In planes, the codes of a row are
contiguous and aligned, and one expression describes every format:

    weight = (value(code) - zero) * scale * group scale + minimum * group minimum

in float32. All products of ggml's types are exact: a scale has 11 significant bits, a group scale
at most 8, a value at most 8, and their sum never exceeds 24. So a weight has the bits of gguf's
dequantiser in any order of operations. The groups of safetensors files have neither group scales
nor minima, and one product. Does not import torch, since a plan has to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout import ceil_div
from parallel.formats.gguf.tensors import CODEBOOK_TYPES, TensorType

GROUP = 32  # weights of a row that are stored together; a matrix may be cut between groups
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, as ggml has them


MAX_E8M0 = 252  # scale with which no code overflows; 255 is not a number
WHOLE_ROW = 1 << 20  # more groups than a row has, which then share a scale
_SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_ORDER_BYTES = 8  # a column's index


@dataclass(frozen=True)
class PlaneFormat:
    """The planes of a format, and how a weight is made from them."""

    name: str  # ggml's, or that of `group_format`
    bits: int  # bits per code: 4, 5, 6, or 8 with a sign
    offset: int = 0  # subtracted from the code, if `values` is empty
    values: tuple[int, ...] = ()  # values of the codes
    scale_groups: int = 1  # groups that share a scale (and zero, and minimum); 0 without a scale
    scale_type: str = "float16"
    sub: int = 0  # weights that share a group scale: 16, 32, or 0 without one
    sub_kind: str = "int8"  # int8 or uint8; or e8m0 or ue4m3, a byte that is a float
    has_minimum: bool = False  # with a group minimum, uint8, where there is a group scale
    has_zero: bool = False  # with a zero of 8 bits that is subtracted from the code
    is_float: bool = False  # codes are e4m3
    order: int = 0  # columns, if they are stored in an order of their own

    def __hash__(self) -> int:
        return hash(self.name)

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
        scale_bytes = scales * _SCALE_BYTES[self.scale_type] + subs
        scale_bytes *= 2 if self.has_minimum else 1
        scale_bytes += scales if self.has_zero else 0
        return (last - first) * self.bits // 8 + scale_bytes


KeptType = PlaneFormat | TensorType  # planes, or blocks with a codebook

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


def group_format(
    codes: str, columns: int, scale_type: str, has_zero: bool, order: int = 0
) -> PlaneFormat | None:
    """Return the format of a matrix with a scale for each group of columns.

    Args:
        codes: int4, int8 or e4m3.
        columns: in a group, or 0 for all of a row.
        scale_type: float16, bfloat16 or float32.
        has_zero: whether a group has a zero; otherwise int4 codes are offset by 8.
        order: number of columns if they are stored in an order of their own, or 0.

    Returns:
        None if a group is not a multiple of GROUP: such matrices are read as numbers.
    """
    if columns % GROUP:
        return None
    name = f"{codes} in {f'groups of {columns}' if columns else 'rows'} of {scale_type}"
    name += " with zeros" if has_zero else ""
    name += f", {order} columns in an order of their own" if order else ""
    return PlaneFormat(
        name,
        bits=4 if codes == "int4" else 8,
        offset=8 if codes == "int4" and not has_zero else 0,
        scale_groups=columns // GROUP or WHOLE_ROW,
        scale_type=scale_type,
        has_zero=has_zero,
        is_float=codes == "e4m3",
        order=order,
    )


def kept_type(name: str) -> KeptType | None:
    """Return how a matrix of a ggml type is kept; None if it is read as numbers."""
    return PLANE_FORMATS.get(name) or CODEBOOK_TYPES.get(name)


def kept_unit(kind: KeptType) -> int:
    """Return the number of columns of which a kept matrix has a multiple."""
    if isinstance(kind, PlaneFormat):
        return kind.order or GROUP
    return kind.numbers


def is_kept(kind: KeptType, columns: slice) -> bool:
    """Return whether a rank's columns of a matrix are kept: they cut no unit."""
    unit = kept_unit(kind)
    return not (columns.start % unit or columns.stop % unit)


def kept_bytes(kind: KeptType, rows: int, columns: slice) -> int:
    """Return the bytes of these columns of some rows of a matrix that is kept."""
    if isinstance(kind, PlaneFormat):
        return rows * kind.row_bytes(columns.start, columns.stop) + _ORDER_BYTES * kind.order
    return rows * ((columns.stop - columns.start) // kind.numbers * kind.nbytes)
