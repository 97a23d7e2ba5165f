"""The kernel caches of oneDNN and torch are limited before any kernel is compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import ctypes
from decoding.app.environment import set_environment_defaults
set_environment_defaults()
import torch

class Allocated(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

def in_use():
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Allocated
    return mallinfo().uordblks

weight = torch.ones(256, 256, dtype=torch.bfloat16)
for rows in [*range(1, 301), 1]:
    if rows == 201:
        before = in_use()
    torch.mm(torch.ones(rows, 256, dtype=torch.bfloat16), weight)
print("growth:", in_use() - before)
"""
ONEDNN, TORCH = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def run(variables: dict[str, str]) -> tuple[int, int]:
    """Return the kernels compiled for matmuls of 300 sizes, and heap growth in the last 100."""
    command = [sys.executable, "-c", CODE]
    environment = os.environ | {"ONEDNN_VERBOSE": "2"} | variables
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    compiled = out.stdout.count("create:cache_miss,cpu,matmul")
    if not compiled:
        pytest.skip("oneDNN has no bfloat16 kernels for this processor")
    return compiled, int(out.stdout.split()[-1])


def test_evicted_kernels_are_compiled_again() -> None:
    compiled, growth = run({})
    assert compiled == 301
    assert growth < 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("variable", [ONEDNN, TORCH])
def test_limits_set_by_the_user_are_kept(variable: str) -> None:
    _, limited = run({})
    compiled, growth = run({variable: "1024"})
    assert compiled == (300 if variable == ONEDNN else 301)
    # 100 kernels take 2 to 20 MB, which depends on the processor
    assert growth > 5 * max(limited, 100_000)
