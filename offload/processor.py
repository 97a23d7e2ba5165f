"""What the processor is good at."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for products in bfloat16.

    One without takes ten to fifty times as long for them as for products in float32.
    """
    return torch.backends.cpu.get_cpu_capability() != "AVX2"
