"""Matrices whose blocks stay as in their file: ggml's types of less than 4 bits, with codebooks.

Source of the layouts: ggml-common.h of github.com/ggml-org/ggml, and the dequantisers of its
Python package gguf, from which the codebooks are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from parallel.formats.gguf.tensors import CODEBOOK_TYPES
from parallel.formats.tensors import Parts
from parallel.weights.ggml_blocks import bits, fields, halves, nibbles

_UNPACKED = 1 << 16  # weights unpacked at once on a CPU; each needs some 30 bytes


class CodebookBlocks(Module):
    """Rows of a matrix (R, columns) in blocks; `columns` is a multiple of the block's.

    Memory is uninitialized until rows are written.
    """

    def __init__(self, name: str, rows: int, columns: int, device: torch.device):
        super().__init__()
        self.name, self.columns = name, columns
        kind = CODEBOOK_TYPES[name]
        shape = (rows, columns // kind.numbers, kind.nbytes)
        raw = torch.empty(shape, dtype=torch.uint8, device=device)
        self.raw = Parameter(raw, requires_grad=False)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.raw)

    def write(self, rows: slice, raw: Tensor | Parts) -> None:
        """Store blocks (R, B, bytes of a block) uint8.

        Raises ValueError for a scale that is not finite.
        """
        assert isinstance(raw, Tensor)
        first, last = _SCALES.get(self.name, (0, 2))
        if not halves(raw[..., first:last]).isfinite().all():
            raise ValueError("a scale is not finite")
        self.raw[rows].copy_(raw)

    def clear(self, rows: slice) -> None:
        """Write rows of zeros."""
        self.raw[rows] = 0

    def unpack(self, rows: slice | Tensor, out: Tensor) -> Tensor:
        """Write rows (R, columns), a slice of them or indices, into `out` in its dtype."""
        selected = self.raw[rows]
        limit = _UNPACKED if self.raw.is_cpu else 64 * _UNPACKED
        step = max(1, limit // self.columns)
        for raw, target in zip(selected.split(step), out.split(step), strict=True):
            target.copy_(_DEQUANTISERS[self.name](raw).view(len(raw), -1))
        return out


@cache
def _codebook(name: str, device: torch.device) -> Tensor:
    """Return a codebook (entries, 4 or 8) float32."""
    from gguf import quants  # slow import: half a second

    table = getattr(quants, name)
    table.init_grid()
    return torch.from_numpy(table.grid).to(device).flatten(0, 2)


@cache
def _sign_patterns(device: torch.device) -> Tensor:
    """Return the signs (128, 8) float32 that 7 bits stand for: the eighth makes them even."""
    from gguf import quants

    return _signs(torch.tensor(list(quants.IQ2_XXS.ksigns), dtype=torch.uint8, device=device))


def _signs(data: Tensor) -> Tensor:
    """Return the signs (..., 8) float32 of bytes (...): a bit that is set stands for -1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return 1.0 - 2.0 * (data[..., None] >> shifts & 1).float()


def _half(raw: Tensor, offset: int) -> Tensor:
    """Return one float16 (R, B, 1) of each block in float32."""
    return halves(raw[..., offset : offset + 2]).float()


def _words(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers (R, B, n) of bytes (R, B, bytes), as int32."""
    return raw.contiguous().view(dtype).int()


def _q2_k(raw: Tensor) -> Tensor:
    scales = raw[..., :16]
    scale = (_half(raw, 80) * (scales & 15).float())[..., None]
    minimum = (_half(raw, 82) * (scales >> 4).float())[..., None]
    codes = fields(raw[..., 16:80], 2, 32) & 3
    return scale * codes.unflatten(2, (16, 16)).float() - minimum


def _q3_k(raw: Tensor) -> Tensor:
    low, high = raw[..., 96:104], raw[..., 104:108]
    scale = (nibbles(low, 8) | (fields(high, 2, 4) & 3) << 4).to(torch.int8) - 32
    codes = (fields(raw[..., 32:96], 2, 32) & 3).to(torch.int8)
    codes -= 4 * (1 - (fields(raw[..., :32], 1, 32) & 1).to(torch.int8))
    factor = (_half(raw, 108) * scale.float())[..., None]
    return factor * codes.unflatten(2, (16, 16)).float()


def _iq2_xxs(raw: Tensor) -> Tensor:
    parts = raw[..., 2:].unflatten(2, (8, 8))  # 4 indices and 4 bytes per group
    meta = _words(parts[..., 4:], torch.int32)  # (R, B, 8, 1)
    scale = _half(raw, 0) * (0.5 + (meta[..., 0] >> 28 & 15).float()) * 0.25
    shifts = torch.arange(0, 28, 7, device=raw.device)
    signs = _sign_patterns(raw.device)[meta >> shifts & 127]
    points = _codebook("IQ2_XXS", raw.device)[parts[..., :4].int()]  # (R, B, 8, 4, 8)
    return scale[..., None, None] * points * signs


def _iq2_xs(raw: Tensor) -> Tensor:
    codes = _words(raw[..., 2:66], torch.int16) & 0xFFFF  # (R, B, 32)
    scale = _half(raw, 0) * (0.5 + nibbles(raw[..., 66:], 1).float()) * 0.25
    signs = _sign_patterns(raw.device)[codes >> 9]
    points = _codebook("IQ2_XS", raw.device)[codes & 511]  # (R, B, 32, 8)
    return scale[..., None, None] * (points * signs).unflatten(2, (16, 2))


def _iq2_s(raw: Tensor) -> Tensor:
    scale = _half(raw, 0) * (0.5 + nibbles(raw[..., 74:], 1).float()) * 0.25
    high = (fields(raw[..., 66:74], 2, 1) & 3).int() << 8
    points = _codebook("IQ2_S", raw.device)[raw[..., 2:34].int() | high]  # (R, B, 32, 8)
    return scale[..., None, None] * (points * _signs(raw[..., 34:66])).unflatten(2, (16, 2))


def _iq3_xxs(raw: Tensor) -> Tensor:
    meta = _words(raw[..., 66:], torch.int32)  # (R, B, 8)
    scale = _half(raw, 0) * (0.5 + (meta >> 28 & 15).float()) * 0.5
    shifts = torch.arange(0, 28, 7, device=raw.device)
    signs = _sign_patterns(raw.device)[meta[..., None] >> shifts & 127]  # (R, B, 8, 4, 8)
    points = _codebook("IQ3_XXS", raw.device)[raw[..., 2:66].int()]  # (R, B, 64, 4)
    return scale[..., None, None] * points.view(signs.shape) * signs


def _iq3_s(raw: Tensor) -> Tensor:
    scale = _half(raw, 0) * (1 + 2 * nibbles(raw[..., 106:], 1).float())
    high = bits(raw[..., 66:74]).int() << 8
    points = _codebook("IQ3_S", raw.device)[raw[..., 2:66].int() | high]  # (R, B, 64, 4)
    signs = _signs(raw[..., 74:106]).unflatten(2, (8, 4))
    return scale[..., None, None] * points.view(signs.shape) * signs


_DEQUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
# places of a block's scales that are not its first two bytes
_SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110)}
