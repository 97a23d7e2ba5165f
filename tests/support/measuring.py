"""Measuring briefly, where the matter is what becomes of the numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from torch import Tensor

from decoding.probe import kernels, rates, split_rates


def measure_briefly() -> None:
    """Make a probe of this process take few and small runs. For processes that end with a test."""
    typical = rates.median_seconds

    def brief(
        work: Callable[[], Tensor],
        repeats: int = 0,
        before: Callable[[], Tensor] | None = None,
        of: Callable[[list[float]], float] = statistics.median,
    ) -> float:
        return typical(work, 2, before, of)

    sizes = {
        "_PREFILL_ROWS": 512,
        "_PREFIX": 8192,
        "_LARGE_BUDGET": 6144,
        "_KV_BYTES": {"cpu": 16 << 20},
    }
    for module, name, value in (
        *((kernels, name, value) for name, value in sizes.items()),
        *((module, "median_seconds", brief) for module in (kernels, split_rates)),
        *((kernels, "_PREFILL_S", 0.05), (rates, "_REPEATS", 1), (split_rates, "_TOKENS", 1024)),
    ):
        getattr(module, name)  # a name that is gone would be set, and change nothing
        setattr(module, name, value)
