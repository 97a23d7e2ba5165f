"""A plan is arithmetic on sizes: what it imports from here starts without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "errors",
    "host_memory",
    "layout",
    "memory_plan",
    "policies",
    "retrieval_shape",
    "streaming_shape",
    "tiered_shape",
]


@pytest.mark.parametrize("name", MODULES)
def test_no_torch_is_imported(name: str) -> None:
    code = f"import sys, offload.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
