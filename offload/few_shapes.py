"""Few shapes for what torch compiles by shape.

On a CPU its products and its attention in 16 bits make a kernel for each number of rows, and keep
it to the end of the process: 0.3 to 0.7 MB for each weight. Prompts have any length, so many rows
are taken in numbers of which there are few.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # more are taken in multiples of it


def is_compiled(x: Tensor) -> bool:
    """Return whether a kernel would be made for as many rows as x (T, ...) has."""
    return x.is_cpu and x.element_size() == 2 and len(x) > ROWS


def filled_up(x: Tensor) -> Tensor:
    """Return x (T, ...) with rows of zeros behind it, up to a multiple of ROWS."""
    rest = -len(x) % ROWS
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rest]) if rest else x
