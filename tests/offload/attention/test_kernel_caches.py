"""What oneDNN and torch keep of what was compiled is limited, before anything is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.slow import slow_except

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
print("grown by", in_use() - before)
"""
ONEDNN, TORCH = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def run(given: dict[str, str]) -> tuple[int, int]:
    """Return how many kernels products of 300 sizes took, and the bytes that the last 100 left."""
    code = [sys.executable, "-c", CODE]
    given = {"ONEDNN_VERBOSE": "2"} | given
    out = subprocess.run(code, env=os.environ | given, capture_output=True, text=True, check=True)
    made = out.stdout.count("create:cache_miss,cpu,matmul")
    if not made:
        pytest.skip("this processor has no kernels of oneDNN's for bfloat16")
    return made, int(out.stdout.split()[-1])


def test_a_kernel_of_long_ago_is_made_again() -> None:
    made, grown = run({})
    assert made == 301
    assert grown < 2_000_000


@pytest.mark.parametrize("whose", slow_except([ONEDNN, TORCH]))
def test_what_the_user_says_of_it_holds(whose: str) -> None:
    made, grown = run({whose: "1024"})
    assert made == (300 if whose == ONEDNN else 301)
    assert grown > 10_000_000
