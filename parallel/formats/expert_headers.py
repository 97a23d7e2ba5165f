"""Matrices and biases of experts in safetensors files that stack those of a layer.

gpt-oss, Gemma 4, Qwen3.5 and Granite 4 have such. Knows only headers, and does not import torch,
since a plan has to be fast. Source of the layouts: transformers, modeling_gpt_oss.py,
integrations/mxfp4.py, modeling_gemma4.py, modeling_qwen3_5_moe.py and conversion_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parallel.config_checks import MAX_EXPERTS
from parallel.errors import CheckpointError
from parallel.formats.plane_format import GROUP, PLANE_FORMATS, KeptType
from parallel.formats.weight_headers import DTYPES, TensorHeader

MXFP4 = PLANE_FORMATS["MXFP4"]
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
# stacks whose first half of rows are gates, of Gemma 4, Qwen3.5 and Granite 4
_GATES_FIRST = re.compile(r"(?:.+\.)?layers\.\d+\.(?:mlp\.|block_sparse_moe\.)?experts")
_GRANITE4 = {  # ends of Granite 4's names, and what others have instead
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}
_MAX_HEADERS = 1 << 18  # experts' parts in a model; the largest have a third of them


@dataclass(frozen=True)
class ExpertHeader:
    """A matrix (rows, columns) of an expert, or a bias (rows,), and the stacks that hold it.

    Its rows are every `step`-th of those of the expert, from `first` on. Stacks are (experts, rows,
    columns), or (experts, columns, rows) if transposed, of biases (experts, rows), of codes
    (experts, rows, groups, bytes).
    """

    name: str
    shape: tuple[int, ...]
    stack: TensorHeader
    scale: TensorHeader | None  # (experts, rows, groups); None if it is not quantised
    expert: int
    first: int
    step: int
    is_transposed: bool

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

    Those of other models, with other rows, are left out. Raises CheckpointError for stacks whose
    types or shapes do not belong together, or that hold what another tensor does.
    """
    headers: dict[str, ExpertHeader] = {}
    stacks: set[str] = set()
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(_usual_name(name))
        has_biases = match is not None and f"{match[1]}.gate_up_proj_bias" in tensors
        has_gates_first = match is not None and not match[3] and _GATES_FIRST.fullmatch(match[1])
        if match is None or not (has_biases or has_gates_first):
            continue
        stacks.add(name)
        stack = _stack(tensor, match, has_biases, tensors)
        for header in () if stack is None else stack.experts():
            if header.name in headers or header.name in tensors:
                raise _broken(tensor, f"holds {header.name}, which is stored twice")
            headers[header.name] = header
        if len(headers) > _MAX_HEADERS:
            raise _broken(tensor, f"is one of stacks with more than {_MAX_HEADERS:,} matrices")
    return headers, stacks


def _usual_name(name: str) -> str:
    """Return the name that a stack has in most models."""
    for own, usual in _GRANITE4.items():
        if name.endswith(f".{own}"):
            return name.removesuffix(own) + usual
    return name


def _stack(
    tensor: TensorHeader,
    name: re.Match[str],
    is_gpt_oss: bool,
    tensors: Mapping[str, TensorHeader],
) -> _Stack | None:
    """Return the stack of this name; None for the scales of one. Raises CheckpointError."""
    prefix, kind, suffix = name.groups()
    scale = None
    if suffix == "_scales":
        if f"{prefix}.{kind}_blocks" not in tensors:
            raise _broken(tensor, "has no codes (_blocks) beside it")
        return None
    if suffix == "_blocks":
        scale = _scale(tensor, tensors.get(f"{prefix}.{kind}_scales"))
    elif tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{tensor.path}: the experts' tensor {tensor.name} is {tensor.dtype}; only MXFP4 and "
            f"{', '.join(DTYPES)} are supported in stacks of experts. Use a GGUF file or the "
            "16-bit checkpoint."
        )
    return _Stack(prefix, kind, tensor, scale, suffix == "_bias", is_gpt_oss)


class _Stack(NamedTuple):
    """One tensor with the matrices or biases of all experts of a layer."""

    prefix: str
    kind: str  # gate_up_proj or down_proj
    stack: TensorHeader
    scale: TensorHeader | None
    is_bias: bool
    is_gpt_oss: bool  # gates and ups alternate, and matrices in numbers are transposed

    def experts(self) -> Iterator[ExpertHeader]:
        """Yield what it holds of each expert. Raises CheckpointError."""
        experts, height, inner = self._sizes()
        is_transposed = self.is_gpt_oss and self.scale is None and not self.is_bias
        names = ("gate_proj", "up_proj") if self.kind == "gate_up_proj" else ("down_proj",)
        if height % len(names):
            raise _broken(self.stack, f"has {height} rows for two matrices")
        rows, kind = height // len(names), "bias" if self.is_bias else "weight"
        step = len(names) if self.is_gpt_oss else 1
        for expert in range(experts):
            for index, part in enumerate(names):
                name = f"{self.prefix}.{expert}.{part}.{kind}"
                first, shape = index if self.is_gpt_oss else index * rows, (rows, *inner)
                yield ExpertHeader(
                    name, shape, self.stack, self.scale, expert, first, step, is_transposed
                )

    def _sizes(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of experts, and the rows and columns of each."""
        shape = self.stack.shape
        dimensions = 2 if self.is_bias else 3 if self.scale is None else 4
        if len(shape) != dimensions or not all(shape) or shape[0] > MAX_EXPERTS:
            raise _broken(self.stack, f"has shape {shape}, which is no stack of experts")
        experts, *sizes = shape
        if self.is_bias:
            return experts, sizes[0], ()
        if self.scale is not None:
            return experts, sizes[0], (sizes[1] * GROUP,)
        if self.is_gpt_oss:
            sizes.reverse()
        return experts, sizes[0], (sizes[1],)


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
