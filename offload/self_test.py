"""Self-tests of fused kernels: plain operations replace those that fail on a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

import torch

from offload.errors import is_out_of_memory, one_line

Kernels = tuple[ModuleType | None, str]  # the kernels to use, or None, and the reason


def run_self_test(name: str, test: Callable[..., None], device: str, *shape: Any) -> Kernels:
    """Return a module of kernels if they pass `test`, and the reason; all of them are CUDA's.

    Args:
        name: of the module.
        test: raises an error if its kernels are wrong; it gets the module, the device and `shape`.
        device: type of the device.
        shape: for the test.

    Raises out-of-memory errors (`is_out_of_memory`): they do not mean that the kernels are wrong.
    """
    if device != "cuda":
        return None, f"there are none for {device}"
    try:
        kernels = import_module(name)
        test(kernels, torch.device(device), *shape)
    # whichever error a compiler or driver raises, plain operations work without the kernels
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, _reason(error)
    return kernels, "the self-test passed"


def _reason(error: Exception) -> str:
    """Return why kernels cannot be used, and what to install if triton cannot compile."""
    reason = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, CalledProcessError | FileNotFoundError) or "C compiler" in reason:
        reason += "; triton needs gcc and Python.h here: install gcc and python3-dev"
    return reason
