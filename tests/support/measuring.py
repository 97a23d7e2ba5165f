"""Brief measurements, for tests of how the numbers are used."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from torch import Tensor

from decoding.probe import kernels, rates, split_rates


def measure_briefly() -> None:
    """Reduce the runs of probes in this process, which must end with the test."""
    median_seconds = rates.median_seconds

    def brief_median(
        work: Callable[[], Tensor],
        repeats: int = 0,
        before: Callable[[], Tensor] | None = None,
        statistic: Callable[[list[float]], float] = statistics.median,
    ) -> float:
        return median_seconds(work, 2, before, statistic)

    sizes = {
        "_PREFILL_ROWS": 512,
        "_PREFIX": 8192,
        "_LARGE_BUDGET": 6144,
        "_KV_BYTES": {"cpu": 16 << 20},
    }
    for module, name, value in (
        *((kernels, name, value) for name, value in sizes.items()),
        *((module, "median_seconds", brief_median) for module in (kernels, split_rates)),
        *((kernels, "_PREFILL_S", 0.05), (rates, "_REPEATS", 1), (split_rates, "_TOKENS", 1024)),
    ):
        getattr(module, name)  # raises for names that no longer exist
        setattr(module, name, value)
