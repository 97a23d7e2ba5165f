"""The tensors of a GGUF file: which types are read, and whether the header places them sensibly.

Needs nothing but Python, since a plan has to answer at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from parallel.errors import CheckpointError
from parallel.formats.gguf_header import GgufHeader, TensorInfo


@dataclass(frozen=True)
class TensorType:
    """How ggml stores numbers: in blocks of so many, of so many bytes."""

    name: str
    numbers: int
    nbytes: int


TYPES = {  # that are read, by ggml's number
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
}


def tensor_end(info: TensorInfo) -> int:
    """Return the first byte of the file behind a tensor of a type that is read."""
    kind = TYPES[info.kind]
    return info.start + math.prod(info.shape) // kind.numbers * kind.nbytes


def check_tensor_offsets(header: GgufHeader) -> None:
    """Refuse tensors that are not read, or that overlap, whether or not the file is whole.

    Raises CheckpointError.
    """
    for info in header.tensors.values():
        if info.kind not in TYPES:
            raise CheckpointError(
                f"{header.path}: tensor {info.name} is of {_type_name(info.kind)}; read are "
                f"{', '.join(kind.name for kind in TYPES.values())}."
            )
        numbers = TYPES[info.kind].numbers
        if not info.shape or info.shape[-1] % numbers:
            raise CheckpointError(
                f"{header.path}: tensor {info.name} of shape {info.shape} is not made of whole "
                f"blocks of {numbers} numbers: the file is broken. Fetch it again."
            )
    placed = sorted(header.tensors.values(), key=lambda info: (info.start, tensor_end(info)))
    for before, info in pairwise(placed):
        if info.start < tensor_end(before):
            raise CheckpointError(
                f"{header.path}: tensors {before.name} and {info.name} overlap: the file is "
                "broken. Fetch it again."
            )


def check_end(header: GgufHeader, info: TensorInfo) -> None:
    """Raise CheckpointError for a tensor that is not all there."""
    if tensor_end(info) > header.size:
        raise CheckpointError(
            f"{header.path} ends before tensor {info.name} does. Was the download interrupted? "
            "Fetch it again."
        )


def _type_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType  # which takes half a second

    known = {each.value: each.name for each in GGMLQuantizationType}
    return f"type {known[kind]}" if kind in known else f"an unknown type ({kind})"
