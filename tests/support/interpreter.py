"""The fused kernels in triton's interpreter, where it runs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import torch


def interpreted(name: str) -> Any:
    """Return the kernels of a module, in triton's interpreter.

    The test is skipped on a machine with a GPU, where tests/gpu compiles them, and with versions of
    triton and numpy that do not go together.
    """
    if torch.cuda.is_available():
        pytest.skip("compiled here, for a GPU")
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        # github.com/triton-lang/triton/issues/9171
        pytest.skip("the interpreter of triton before 3.7 does not run with numpy 2.4 or later")
    return import_module(name)


def _version(name: str) -> tuple[int, ...]:
    """Return the first two numbers of what is installed under a name."""
    return tuple(int(each) for each in version(name).split(".")[:2])
