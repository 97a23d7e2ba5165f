"""The part of a GPU day that runs the tests marked `cuda`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.choices import row
from bench.harness.experiment import ROOT, Row

PATHS = (  # tests with this mark; other files import packages that a machine may lack
    "tests/gpu",
    "tests/parallel/weights/test_weight_kernels.py",
    "tests/offload/memory/test_transfer_ring.py",
    "tests/offload/attention/test_attention.py",
    "tests/decoding/speculation/test_sampling.py",
)
_WORKERS = 10  # each has its own context on the GPU
_TEST_S = 100  # time limit of one test
REHEARSED = "replay_reads"  # a single test in a rehearsal: all of them would take minutes


def run_tests(log: Path, limit_s: float, rehearse: bool, matching: str | None) -> Iterator[Row]:
    """Run the tests, and yield pytest's failures and summary.

    Args:
        log: file for pytest's output.
        limit_s: seconds after which the tests and their child processes are killed.
        rehearse: whether to run a single test.
        matching: the tests to run, like pytest's -k; None: all.
    """
    command = [sys.executable, "-m", "pytest", "-m", "cuda", *PATHS, "-rfE"]
    command += ["-p", "no:cacheprovider", "--durations=8"]
    if find_spec("pytest_timeout"):
        command += ["--timeout", str(_TEST_S)]
    if rehearse or matching:
        command += ["-k", matching or REHEARSED]
    if find_spec("xdist") and not rehearse:
        command += ["-n", str(min(_WORKERS, len(os.sched_getaffinity(0))))]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield row("tests", "failed test", line)
    counts = [line for line in lines if " in " in line and ("passed" in line or "failed" in line)]
    yield row("tests", "pytest -m cuda", (counts or lines or ["no output"])[-1])
    if code is None:
        yield row("tests", "failed", f"killed after {limit_s:.0f} s: the time limit was reached")
    elif code:
        yield row("tests", "failed", f"pytest ended with exit code {code}: see {log.name}")
