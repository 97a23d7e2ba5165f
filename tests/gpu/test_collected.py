"""The tests that run on a GPU are found on a machine that has torch and pytest, and little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.tests import PATHS

ROOT = Path(__file__).parents[2]
MISSING = ["gguf", "openai", "fastapi", "uvicorn", "sse_starlette", "prometheus_client", "ray"]
MISSING += ["flash_attn", "playwright", "matplotlib", "deepspeed"]
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
import pytest
sys.exit(pytest.main(["-m", "cuda", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
def test_they_are_collected_without_what_other_tests_need() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    files = {line.partition(":")[0] for line in done.stdout.splitlines() if ".py: " in line}
    assert files
    folders = tuple(path for path in PATHS if not path.endswith(".py"))
    elsewhere = {file for file in files if not file.startswith(folders)}
    assert elsewhere == {path for path in PATHS if path.endswith(".py")}
