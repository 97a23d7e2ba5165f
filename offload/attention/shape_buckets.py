"""What torch does on a CPU: few shapes for what it compiles by shape, and products in bfloat16.

On a CPU its products and its attention in 16 bits make a kernel for each number of rows, and keep
it to the end of the process: 0.3 to 0.7 MB for each weight. Prompts have any length, and drafts
many, so rows are taken in numbers of which there are few.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # more are taken in multiples of it
_FEW_ROWS = 16  # up to ROWS, in multiples of this


def compiles_per_shape(x: Tensor, beyond: int) -> bool:
    """Return whether x (T, ...) has more rows than `beyond`, and a kernel would be made for it."""
    return x.is_cpu and x.element_size() == 2 and len(x) > beyond


def pad_rows(x: Tensor) -> Tensor:
    """Return x (T, ...) with rows of zeros behind it, so that there are few numbers of rows."""
    rest = -len(x) % (ROWS if len(x) > ROWS else _FEW_ROWS)
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rest]) if rest else x


@cache
def has_native_bf16() -> bool:
    """Return whether this processor has instructions for products in bfloat16.

    One without takes ten to fifty times as long for them as for products in float32.
    """
    return torch.backends.cpu.get_cpu_capability() != "AVX2"
