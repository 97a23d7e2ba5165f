"""What oneDNN keeps of what it has compiled is limited, before it compiles anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from parallel.group import Group
Group.from_environment("cpu")
import torch
weight = torch.ones(256, 256, dtype=torch.bfloat16)
for rows in [*range(1, 301), 1]:
    torch.mm(torch.ones(rows, 256, dtype=torch.bfloat16), weight)
"""


@pytest.mark.parametrize(("kept", "made"), [(None, 301), ("1024", 300)])
def test_a_kernel_of_long_ago_is_made_again(kept: str | None, made: int) -> None:
    given = {"ONEDNN_VERBOSE": "2"} | ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": kept} if kept else {})
    code = [sys.executable, "-c", CODE]
    out = subprocess.run(code, env=os.environ | given, capture_output=True, text=True, check=True)
    found = out.stdout.count("create:cache_miss,cpu,matmul")
    if not found:
        pytest.skip("this processor has no kernels of oneDNN's for bfloat16")
    assert found == made
