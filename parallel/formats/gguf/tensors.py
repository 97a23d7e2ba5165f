"""The tensors of a GGUF file: supported types, validation of their offsets, and short ones.

Imports only the standard library, since a plan has to be fast.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from parallel.errors import CheckpointError
from parallel.formats.gguf.header import GgufHeader, TensorInfo


@dataclass(frozen=True)
class TensorType:
    """A ggml tensor type: a block of `nbytes` bytes holds `numbers` elements."""

    name: str
    numbers: int
    nbytes: int


TYPES = {  # supported types, keyed by ggml's type number
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    22: TensorType("IQ2_S", 256, 82),
    18: TensorType("IQ3_XXS", 256, 98),
    21: TensorType("IQ3_S", 256, 110),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}

# types that are kept in their blocks, keyed by name: their weights are looked up in a codebook, or
# have 2 or 3 bits
CODEBOOK_TYPES = {
    each.name: each
    for each in TYPES.values()
    if each.name in ("Q2_K", "Q3_K") or each.name.startswith(("IQ2", "IQ3"))
}


def tensor_end(info: TensorInfo) -> int:
    """Return the offset in bytes after the end of a tensor of a supported type."""
    kind = TYPES[info.kind]
    return info.start + math.prod(info.shape) // kind.numbers * kind.nbytes


def check_tensor_offsets(header: GgufHeader) -> None:
    """Raise CheckpointError if tensors overlap or have unsupported types.

    The file may be incomplete.
    """
    for info in header.tensors.values():
        if info.kind not in TYPES:
            raise CheckpointError(
                f"{header.path}: tensor {info.name} is of {_type_name(info.kind)}; supported are "
                f"{', '.join(kind.name for kind in TYPES.values())}."
            )
        numbers = TYPES[info.kind].numbers
        if not info.shape or info.shape[-1] % numbers:
            raise CheckpointError(
                f"{header.path}: tensor {info.name} of shape {info.shape} does not consist of "
                f"whole blocks of {numbers} numbers: the file is broken. Fetch it again."
            )
    placed = sorted(header.tensors.values(), key=_place)
    for before, info in pairwise(placed):
        if info.path == before.path and info.start < tensor_end(before):
            raise CheckpointError(
                f"{info.path}: tensors {before.name} and {info.name} overlap: the file is "
                "broken. Fetch it again."
            )


def _place(info: TensorInfo) -> tuple[Path, int, int]:
    return info.path, info.start, tensor_end(info)


def check_end(header: GgufHeader, info: TensorInfo) -> None:
    """Raise CheckpointError for a tensor that extends past the end of the file."""
    if tensor_end(info) > header.sizes[info.path]:
        raise CheckpointError(
            f"{info.path} ends before tensor {info.name} does. Was the download interrupted? "
            "Fetch it again."
        )


def _type_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType  # slow import: half a second

    known = {member.value: member.name for member in GGMLQuantizationType}
    return f"type {known[kind]}" if kind in known else f"an unknown type ({kind})"


def read_floats(
    header: GgufHeader, tensor: TensorInfo, count: int, maximum: float = 1e6
) -> list[float]:
    """Return the elements of a short F32 tensor, all above 0. Raises CheckpointError."""
    if tensor.shape != (count,) or tensor.kind:  # 0 is F32
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has shape {tensor.shape}; expected {count} "
            "numbers in F32."
        )
    check_end(header, tensor)  # before memory is allocated for it
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            numbers = list(struct.unpack(f"<{count}f", file.read(4 * count)))
    except (OSError, struct.error) as error:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} cannot be read ({error}). Fetch the file again."
        ) from error
    if not all(1e-6 <= number <= maximum for number in numbers):
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name} has numbers that are not positive, or are "
            "out of bounds. Fetch the file again."
        )
    return numbers
