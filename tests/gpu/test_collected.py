"""GPU tests are collected on a machine with torch and pytest, and little else installed."""

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
def test_gpu_tests_are_collected_without_optional_packages() -> None:
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    files = {line.partition(":")[0] for line in result.stdout.splitlines() if ".py: " in line}
    assert files
    folders = tuple(path for path in PATHS if not path.endswith(".py"))
    single_files = {file for file in files if not file.startswith(folders)}
    assert single_files == {path for path in PATHS if path.endswith(".py")}
