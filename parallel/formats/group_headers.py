"""Quantised matrices of safetensors files: which tensors hold a matrix, and in which layout.

Knows only headers: names, data types and shapes. Does not import torch, since a plan has to be
fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from offload.layout import ceil_div
from parallel.errors import CheckpointError
from parallel.formats.plane_format import GROUP, PlaneFormat, group_format
from parallel.formats.quantisation import Quantisation
from parallel.formats.weight_headers import DTYPES, WORDS, TensorHeader

WORD = 32  # bits of a number in which codes are packed
_SCALE_DTYPES = {**DTYPES, "F8_E8M0": "bfloat16"}  # an exponent, which bfloat16 holds exactly
# Names beside a quantised matrix that describe activations or KV, which are not quantised here
_RUNTIME = (
    *("input_scale", "input_zero_point", "input_scale_ub", "activation_scale"),
    *("output_scale", "output_zero_point"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point"),
)
# the suffix of a matrix's codes, and those of its other tensors
_PARTS = {
    "qweight": ("scales", "qzeros", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    "weight": ("weight_scale", "weight_scale_inv", "weight_zero_point"),
}
_BYTE_CODES = {"F8_E4M3": "e4m3", "I8": "int8"}


@dataclass(frozen=True)
class GroupHeader:
    """A quantised matrix (rows, columns) of a file, and the tensors that hold it."""

    name: str
    shape: tuple[int, int]
    layout: str  # gptq and awq are (columns, rows) in words; rows are (rows, columns)
    codes: TensorHeader
    scale: TensorHeader
    zero: TensorHeader | None
    g_idx: TensorHeader | None  # the group of each column
    code_type: str  # int4, int8 or e4m3
    group: int  # columns that share a scale
    block_rows: int  # rows that share it
    has_order: bool  # groups' columns may lie anywhere in a row
    is_zero_less_one: bool

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return ceil_div(self.shape[1], self.group)

    def overlapping_groups(self, columns: slice) -> slice:
        """Return the groups that overlap the columns, if these are in order."""
        return slice(columns.start // self.group, max(1, ceil_div(columns.stop, self.group)))

    @property
    def per_word(self) -> int:
        """The number of codes in a word, 1 for codes that are bytes of their own."""
        if self.codes.dtype in _BYTE_CODES:
            return 1
        return WORD // (4 if self.code_type == "int4" else 8)

    @property
    def planes(self) -> PlaneFormat | None:
        """The format in which the matrix is kept; None if it is read as numbers."""
        columns = self.shape[1]
        if columns % GROUP:
            return None
        return group_format(
            self.code_type,
            0 if self.groups == 1 else self.group,
            _SCALE_DTYPES[self.scale.dtype],
            self.zero is not None,
            columns if self.has_order else 0,
        )


def group_headers(
    tensors: Mapping[str, TensorHeader], quantisation: Quantisation
) -> tuple[dict[str, GroupHeader], set[str]]:
    """Return the quantised matrices by name, and the names of all tensors that they consist of.

    Raises CheckpointError for tensors whose types or shapes do not belong together.
    """
    matrices: dict[str, GroupHeader] = {}
    parts: set[str] = set()
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in _RUNTIME:
            parts.add(name)
            continue
        if suffix not in _PARTS or (suffix == "weight" and tensor.dtype not in _BYTE_CODES):
            continue
        others = {f"{module}.{other}" for other in _PARTS[suffix]} & tensors.keys()
        parts |= {name, *others}
        beside = {each.rpartition(".")[2]: tensors[each] for each in others}
        reader = _Reader(f"{module}.weight", tensor, beside, quantisation)
        matrices[f"{module}.weight"] = _READERS[suffix](reader)
    for name, tensor in tensors.items():
        if name not in parts and tensor.dtype not in DTYPES:
            raise broken_matrix(tensor.path, name, f"is {tensor.dtype}, with no scales beside it")
    return matrices, parts


class _Reader:
    """Interprets the headers of one matrix."""

    def __init__(
        self,
        name: str,
        codes: TensorHeader,
        beside: Mapping[str, TensorHeader],
        quantisation: Quantisation,
    ):
        self.name, self.codes, self.beside, self.quantisation = name, codes, beside, quantisation

    def error(self, what: str) -> CheckpointError:
        """Return an error about the matrix."""
        return broken_matrix(self.codes.path, self.name, what)

    def part(self, suffix: str, dtypes: tuple[str, ...] = ("I32",)) -> TensorHeader:
        """Return a tensor of the matrix, with two dimensions. Raises CheckpointError."""
        tensor = self.codes if suffix in WORDS else self.beside.get(suffix)
        if tensor is None:
            raise self.error(f"has no {suffix}")
        if tensor.dtype not in dtypes:
            raise self.error(f"has {suffix} of {tensor.dtype} instead of {' or '.join(dtypes)}")
        if len(tensor.shape) != 2:
            raise self.error(f"has {suffix} of shape {tensor.shape}, which is not a matrix")
        return tensor

    def expect(self, suffix: str, tensor: TensorHeader, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor has this shape."""
        if tensor.shape != shape:
            raise self.error(f"has {suffix} of shape {tensor.shape} instead of {shape}")

    def in_words(self) -> GroupHeader:
        """Return a matrix of GPTQ or AWQ: codes of (columns, rows), scales (groups, rows)."""
        layout = self.quantisation.method
        if layout not in ("gptq", "awq"):
            raise self.error(f"has a qweight, but its config says {layout}")
        codes, scale = self.part("qweight"), self.part("scales", tuple(DTYPES))
        zero, g_idx = self.part("qzeros"), self.beside.get("g_idx") if layout == "gptq" else None
        groups, rows = scale.shape
        # Each matrix has its own number of bits, since some files mix them.
        widths = {bits: ceil_div(rows * bits, WORD) for bits, _ in sorted(self.quantisation.sizes)}
        bits = next((bits for bits in widths if (groups, widths[bits]) == zero.shape), None)
        if bits is None:
            expected = " or ".join(str((groups, width)) for width in widths.values())
            raise self.error(f"has qzeros of shape {zero.shape} instead of {expected}")
        if layout == "gptq":
            columns = codes.shape[0] * WORD // bits
            self.expect("qweight", codes, (codes.shape[0], rows))
        else:
            columns = codes.shape[0]
            self.expect("qweight", codes, (columns, zero.shape[1]))
        if g_idx is not None:
            self.expect("g_idx", g_idx, (columns,))
        sizes = self.sizes(columns, groups, bits)
        return self.header(layout, (rows, columns), scale, sizes, zero, g_idx)

    def packed(self) -> GroupHeader:
        """Return a matrix of compressed-tensors: words (rows, columns), scales (rows, groups)."""
        if (method := self.quantisation.method) != "compressed-tensors":
            raise self.error(f"has a weight_packed, but its config says {method}")
        codes, scale = self.part("weight_packed"), self.part("weight_scale", tuple(DTYPES))
        rows, groups = codes.shape[0], scale.shape[1]
        self.expect("weight_scale", scale, (rows, groups))
        sizes = {
            (bits, size)
            for bits in {bits for bits, _ in self.quantisation.sizes}
            for _, size in self.sizes(codes.shape[1] * WORD // bits, groups, bits)
        }
        bits = min((bits for bits, _ in sizes), default=4)
        columns = codes.shape[1] * WORD // bits
        zero, g_idx = self.beside.get("weight_zero_point"), self.beside.get("weight_g_idx")
        if zero is not None:
            words = (ceil_div(rows * bits, WORD), groups)
            self.expect("weight_zero_point", zero, words if zero.dtype == "I32" else scale.shape)
        if g_idx is not None:
            self.expect("weight_g_idx", g_idx, (columns,))
        return self.header("rows", (rows, columns), scale, sizes, zero, g_idx)

    def in_bytes(self) -> GroupHeader:
        """Return a matrix of bytes (rows, columns), with a scale per tensor, row, group or block.

        Source of the blocks: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.3.2.
        """
        if len(self.codes.shape) != 2 or not all(self.codes.shape):
            raise self.error(f"has shape {self.codes.shape}")
        rows, columns = self.codes.shape
        scale = self.beside.get("weight_scale_inv") or self.beside.get("weight_scale")
        if scale is None or scale.dtype not in _SCALE_DTYPES:
            raise self.error(f"is {self.codes.dtype}, and has no weight_scale of a known type")
        block_rows, group = self.block_of(rows, columns, scale)
        zero = self.beside.get("weight_zero_point")
        if zero is not None:
            self.expect("weight_zero_point", zero, scale.shape)
        sizes = {(8, group)}
        return self.header("rows", (rows, columns), scale, sizes, zero, None, block_rows)

    def block_of(self, rows: int, columns: int, scale: TensorHeader) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        shape = scale.shape
        if shape in ((), (1,), (1, 1)):
            return rows, columns
        if shape in ((rows,), (rows, 1)):
            return 1, columns
        block = self.quantisation.block
        if block is not None and shape == (ceil_div(rows, block[0]), ceil_div(columns, block[1])):
            return block
        if len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
            return 1, columns // shape[1]
        raise self.error(f"of shape {(rows, columns)} has scales of shape {shape}")

    def sizes(self, columns: int, groups: int, bits: int) -> set[tuple[int, int]]:
        """Return the bits, and the columns that share a scale, that the config allows."""
        sizes = {size for known, size in self.quantisation.sizes if known == bits}
        sizes = {columns if size < 0 else min(size, columns) for size in sizes}
        return {(bits, size) for size in sizes if size and ceil_div(columns, size) == groups}

    def header(
        self,
        layout: str,
        shape: tuple[int, int],
        scale: TensorHeader,
        sizes: set[tuple[int, int]],
        zero: TensorHeader | None,
        g_idx: TensorHeader | None,
        block_rows: int = 1,
    ) -> GroupHeader:
        """Return a header with the only one of these sizes. Raises CheckpointError."""
        if not all(shape):
            raise self.error(f"has shape {shape}")
        if len(sizes) != 1:
            known = " or ".join(
                f"{bits} bits in {'rows' if size < 0 else f'groups of {size}'}"
                for bits, size in sorted(self.quantisation.sizes)
            )
            raise self.error(
                f"has scales of shape {scale.shape} for codes of shape {self.codes.shape}, and "
                f"its config says {known or 'nothing of its kind'}"
            )
        zero_types = ("I8",) if self.codes.dtype in _BYTE_CODES else ("I32", "I8")
        if zero is not None and zero.dtype not in zero_types:
            raise self.error(f"has zero points of {zero.dtype}")
        if g_idx is not None and g_idx.dtype not in ("I32", "I64"):
            raise self.error(f"has {g_idx.name.rpartition('.')[2]} of {g_idx.dtype}")
        ((bits, group),) = sizes
        has_groups = group < shape[1]
        return GroupHeader(
            self.name,
            shape,
            layout,
            self.codes,
            scale,
            zero,
            g_idx if has_groups else None,
            _BYTE_CODES.get(self.codes.dtype) or f"int{bits}",
            group,
            block_rows,
            self.quantisation.has_order and g_idx is not None and has_groups,
            self.quantisation.is_zero_less_one,
        )


_READERS: dict[str, Callable[[_Reader], GroupHeader]] = {
    "qweight": _Reader.in_words,
    "weight_packed": _Reader.packed,
    "weight": _Reader.in_bytes,
}


def broken_matrix(path: Path, name: str, what: str) -> CheckpointError:
    """Return the error for a matrix whose tensors do not belong together."""
    return CheckpointError(
        f"{path}: the quantised matrix {name} {what}. The file is broken, or its config belongs to "
        "another: fetch both again."
    )
