"""The fused kernels in triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import torch


def import_interpreted(name: str) -> Any:
    """Return a module of kernels that run in triton's interpreter.

    The test is skipped on a machine with a GPU, where tests/gpu compiles the kernels, and with
    incompatible versions of triton and numpy.
    """
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on a machine with a GPU")
    require_interpreter()
    return import_module(name)


def require_interpreter() -> None:
    """Skip the test with versions of triton and numpy whose interpreter does not run.

    The interpreter does not look for overflows, for which it needs a third of the time: results are
    compared with those of plain operations, and indices in tests are small.
    """
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        # github.com/triton-lang/triton/issues/9171
        pytest.skip("the interpreter of triton before 3.7 does not run with numpy 2.4 or later")
    interpreter: Any = import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _version(name: str) -> tuple[int, ...]:
    """Return the major and minor version of an installed package."""
    return tuple(int(each) for each in version(name).split(".")[:2])
