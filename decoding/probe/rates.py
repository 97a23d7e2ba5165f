"""Microbenchmarks of single operations: matmul and all-reduce rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matmul import linear

_LARGE_ALL_REDUCE_BYTES = 16 << 20
_REPEATS = 5
RUNS = 9  # timed runs per median
_LONG_ENOUGH = 0.1  # seconds of a sufficient run; a slow device gets no larger matrices


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of one large matmul, an upper bound for all others."""
    size, largest = 256, 2048 if device.type == "cpu" else 8192
    while True:
        x, weight = (random_tensor(size, size, device=device, dtype=dtype) for _ in range(2))
        product = partial(linear, x, weight)
        time_once(product)  # compiles kernels
        if size == largest or 8 * time_once(product) > _LONG_ENOUGH:
            return 2 * size**3 / _seconds(product)
        size *= 2


def random_tensor(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers of this shape.

    They use a separate generator, because torch's default one is unusable after a failed CUDA graph
    capture.
    """
    generator = torch.Generator(device)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def all_reduce_seconds(group: TensorParallelGroup, nbytes: int) -> float:
    """Return the seconds of one all-reduce of `nbytes` bytes; all ranks call it."""
    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=group.device)
    return _seconds(lambda: group.all_reduce(x))


def all_reduce_rate(group: TensorParallelGroup, nbytes: int = _LARGE_ALL_REDUCE_BYTES) -> float:
    """Return the bytes/s of a large all-reduce."""
    return nbytes / all_reduce_seconds(group, nbytes)


def time_once(work: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one run, including the wait for its result."""
    started = time.perf_counter()
    work().flatten()[0].item()
    return time.perf_counter() - started


def median_seconds(
    work: Callable[[], torch.Tensor],
    repeats: int = RUNS,
    before: Callable[[], torch.Tensor] | None = None,
    statistic: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Return the median seconds of a few runs, each including the wait for its result.

    The first run and the calls of `before` are not timed. `statistic` replaces the median: the
    minimum for a prefill, which in practice averages over seconds and is measured in a short run.
    """
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before().item()
        times.append(time_once(work))
    return statistic(times[1:])


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Return the seconds per run of a batch of runs with a single wait at its end.

    The minimum of a few batches; the first batch is not timed.
    """
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(_REPEATS):
            out = work()
        out.flatten()[0].item()
        times.append((time.perf_counter() - started) / _REPEATS)
    return min(times[1:])
