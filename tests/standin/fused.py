"""Fused kernels on a stand-in: triton's interpreter runs them, and each call is one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from standin import SELF_TESTS
from standin.clocks import region_of
from standin.machine import Machine
from standin.tensors import GpuTensor, tensors_in, unwrap


@contextmanager
def fused_kernels(machine: Machine) -> Iterator[None]:
    """Let a stand-in use fused kernels, without their self-tests; 16 bits are float16.

    The interpreter truncates float32 to bfloat16 instead of rounding.
    """
    with ExitStack() as stack:
        # imported here: the tests of other platforms install no triton
        from triton.runtime.interpreter import GridExecutor

        launch = _launcher(machine, GridExecutor.__call__)
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        for module, names in SELF_TESTS.items():
            for name, kernels in names.items():
                stack.enter_context(patch.object(module, name, _pass))
                kernels.cache_clear()
                stack.callback(kernels.cache_clear)
        yield


def _pass(*_: Any) -> None:
    """Succeed: interpreted kernels have tests of their own."""


def _launcher(machine: Machine, run: Callable[..., None]) -> Callable[..., None]:
    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        assert machine.capture is None, "what a captured kernel writes is not known"
        tensors = [x for x in tensors_in((args, kwargs)) if isinstance(x, GpuTensor)]
        reads = [(x.block, region_of(x), False) for x in tensors]
        what, inner, named = executor.fn.__name__, unwrap(args), unwrap(kwargs)

        def work() -> None:
            run(executor, *inner, **named)

        with _disable_current_modes():
            before = [_bytes(x) for x in tensors]
            machine.run(what, reads, work)
            for x, old in zip(tensors, before, strict=True):
                if not torch.equal(_bytes(x), old):  # the kernel does not say what it writes
                    x.block.record_access(machine.current, region_of(x), True, what)

    return launch


def _bytes(x: GpuTensor) -> Tensor:
    return x.inner.contiguous().view(torch.uint8).clone()
