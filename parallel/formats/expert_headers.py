"""Matrices and biases of experts in safetensors files that stack those of a layer, as gpt-oss does.

Knows only headers, and does not import torch, since a plan has to be fast. Source of the layouts:
transformers, modeling_gpt_oss.py and integrations/mxfp4.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallel.config_checks import MAX_EXPERTS
from parallel.errors import CheckpointError
from parallel.formats.plane_format import GROUP, PLANE_FORMATS, KeptType
from parallel.formats.weight_headers import DTYPES, TensorHeader

MXFP4 = PLANE_FORMATS["MXFP4"]
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
# the matrices in a stack: name, first row, and the distance of its rows
_MATRICES = {
    "gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)),
    "down_proj": (("down_proj", 0, 1),),
}


@dataclass(frozen=True)
class ExpertHeader:
    """A matrix (rows, columns) of an expert, or a bias (rows,), and the stacks that hold it.

    Its rows are every `step`-th of those of the expert, from `first` on. Stacks of numbers are
    (experts, columns, rows), of biases (experts, rows), of codes (experts, rows, groups, bytes).
    """

    name: str
    shape: tuple[int, ...]
    stack: TensorHeader
    scale: TensorHeader | None  # (experts, rows, groups); None if it is not quantised
    expert: int
    first: int
    step: int

    @property
    def planes(self) -> KeptType | None:
        """The format in which the matrix is kept; None if it is not quantised."""
        return None if self.scale is None else MXFP4

    def stored_rows(self, rows: slice) -> slice:
        """Return the rows of the stack from the first to the last of these."""
        start = self.first + rows.start * self.step
        return slice(start, max(start, self.first + (rows.stop - 1) * self.step + 1))


def expert_headers(
    tensors: Mapping[str, TensorHeader],
) -> tuple[dict[str, ExpertHeader], set[str]]:
    """Return what stacks of experts hold by name, and the names of the stacks.

    Those without biases are another model's, with other rows: they are left out. Raises
    CheckpointError for stacks whose types or shapes do not belong together.
    """
    headers: dict[str, ExpertHeader] = {}
    stacks: set[str] = set()
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is None or f"{match[1]}.gate_up_proj_bias" not in tensors:
            continue
        stacks.add(name)
        prefix, kind, suffix = match.groups()
        scale = None
        if suffix == "_scales":
            if f"{prefix}.{kind}_blocks" not in tensors:
                raise _broken(tensor, "has no codes (_blocks) beside it")
            continue
        if suffix == "_blocks":
            scale = _scale(tensor, tensors.get(f"{prefix}.{kind}_scales"))
        elif tensor.dtype not in DTYPES:
            raise _broken(tensor, f"is {tensor.dtype}")
        for header in _of_experts(prefix, kind, tensor, scale, is_bias=suffix == "_bias"):
            headers[header.name] = header
    return headers, stacks


def _of_experts(
    prefix: str, kind: str, stack: TensorHeader, scale: TensorHeader | None, is_bias: bool
) -> Iterator[ExpertHeader]:
    """Yield what a stack holds of each expert."""
    dimensions = 2 if is_bias else 3 if scale is None else 4
    shape = stack.shape
    if len(shape) != dimensions or not all(shape) or shape[0] > MAX_EXPERTS:
        raise _broken(stack, f"has shape {shape}, which is no stack of experts")
    height = shape[1] if is_bias or scale is not None else shape[2]
    inner = () if is_bias else (shape[1] if scale is None else shape[2] * GROUP,)
    if height % len(_MATRICES[kind]):
        raise _broken(stack, f"has {height} rows for two matrices")
    for expert in range(shape[0]):
        for part, first, step in _MATRICES[kind]:
            name = f"{prefix}.{expert}.{part}.{'bias' if is_bias else 'weight'}"
            own = height // step, *inner
            yield ExpertHeader(name, own, stack, scale, expert, first, step)


def _scale(blocks: TensorHeader, scale: TensorHeader | None) -> TensorHeader:
    """Return the scales of codes in blocks. Raises CheckpointError unless they belong together."""
    if scale is None:
        raise _broken(blocks, "has no scales (_scales) beside it")
    for each in (blocks, scale):
        if each.dtype != "U8":
            raise _broken(each, f"is {each.dtype} instead of U8")
    if blocks.shape != (*scale.shape, GROUP // 2):
        raise _broken(blocks, f"has shape {blocks.shape} for scales of shape {scale.shape}")
    return scale


def _broken(tensor: TensorHeader, what: str) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: the experts' tensor {tensor.name} {what}. The file is broken, or its "
        "config belongs to another: fetch both again."
    )
