"""Shape buckets for torch's 16-bit CPU kernels, and detection of native bfloat16.

On a CPU, torch's 16-bit matmuls and attention compile a kernel for each number of rows, and cache
it until the process ends: 0.3 to 0.7 MB per weight. Prompts and drafts vary in length, so the
number of rows is padded to one of a few sizes.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # above it, rows are padded to a multiple of it
_FEW_ROWS = 16  # up to ROWS, they are padded to a multiple of this


def compiles_per_shape(x: Tensor, threshold: int) -> bool:
    """Return whether x (T, ...) would compile a kernel, and has more than `threshold` rows."""
    return x.is_cpu and x.element_size() == 2 and len(x) > threshold


def pad_rows(x: Tensor) -> Tensor:
    """Return x (T, ...) padded with rows of zeros to one of a few numbers of rows."""
    rest = -len(x) % (ROWS if len(x) > ROWS else _FEW_ROWS)
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rest]) if rest else x


@cache
def has_native_bf16() -> bool:
    """Return whether this processor has instructions for bfloat16 matmuls.

    Without them, these take ten to fifty times as long as in float32.
    """
    return torch.backends.cpu.get_cpu_capability() != "AVX2"
