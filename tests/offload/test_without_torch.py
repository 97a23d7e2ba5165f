"""Planning is arithmetic on sizes: the modules it imports do not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "errors",
    "memory.host",
    "memory.link_spec",
    "layout",
    "retrieval.policy_specs",
    "retrieval.shape",
    "cache.streaming_shape",
    "tiered.shape",
]


@pytest.mark.parametrize("name", MODULES)
def test_module_does_not_import_torch(name: str) -> None:
    code = f"import sys, offload.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
