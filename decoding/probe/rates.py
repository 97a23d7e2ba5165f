"""The rates that a device and a group of ranks reach, measured on one operation each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from parallel.model.matmul import linear
from parallel.ranks.process_group import TensorParallelGroup

_LARGE_SUM_BYTES = 16 << 20
_REPEATS = 5
RUNS = 9  # that a typical one is told from
_LONG_ENOUGH = 0.1  # seconds of a run that tells a rate; a slow device is not given a larger one


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the operations a second of one large matrix product: the most that could be had."""
    size, largest = 256, 2048 if device.type == "cpu" else 8192
    while True:
        x, weight = (random_tensor(size, size, device=device, dtype=dtype) for _ in range(2))
        product = partial(linear, x, weight)
        time_once(product)  # which makes kernels
        if size == largest or 8 * time_once(product) > _LONG_ENOUGH:
            return 2 * size**3 / _seconds(product)
        size *= 2


def random_tensor(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers of this shape.

    They come of a generator of their own: behind a CUDA graph that could not be recorded, torch's
    does not serve.
    """
    generator = torch.Generator(device)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def all_reduce_seconds(group: TensorParallelGroup, nbytes: int) -> float:
    """Return the seconds of one all-reduce of so many bytes, on all ranks at once."""
    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=group.device)
    return _seconds(lambda: group.all_reduce(x))


def all_reduce_rate(group: TensorParallelGroup, nbytes: int = _LARGE_SUM_BYTES) -> float:
    """Return the bytes a second of a large all-reduce."""
    return nbytes / all_reduce_seconds(group, nbytes)


def time_once(work: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one run, until its result is there."""
    started = time.perf_counter()
    work().flatten()[0].item()
    return time.perf_counter() - started


def median_seconds(
    work: Callable[[], torch.Tensor],
    repeats: int = RUNS,
    before: Callable[[], torch.Tensor] | None = None,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Return the seconds of one of a few runs, each until its result is there.

    The first run does not count, nor what goes `before` each. `of` the times the median is taken,
    or what else is given: the least for a prefill, which averages over seconds and is told from a
    short run.
    """
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before().item()
        times.append(time_once(work))
    return of(times[1:])


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one of several runs on the device, with one wait for all of them.

    It is the least of a few times, of which the first does not count.
    """
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(_REPEATS):
            out = work()
        out.flatten()[0].item()
        times.append((time.perf_counter() - started) / _REPEATS)
    return min(times[1:])
