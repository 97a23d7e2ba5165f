"""Interrupts in the middle of a document: all processes exit, finished records are intact, and the
same command resumes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from decoding.app.terminal.streams import counted
from support.commands import (
    GREEDY_FP32,
    MODELS,
    TIERFORCE,
    TORCHRUN,
    Fork,
    Job,
    Running,
    forked,
    lines,
    records,
)
from support.slow import slow_except

EXIT_TIMEOUT_S = 30.0  # seconds in which all processes of an interrupted job must exit
OFFLOADED = ("--gpu-kv-layers", "0", "--max-new-tokens", "16", "--retrieval-budget", "4096")
# about a second per document, nearly all of it waiting; two ranks transfer half each
SLOW, SLOW_ALONE = ("--link", "emulated:0.004"), ("--link", "emulated:0.016")
TWO = ("--gpus", "2")


def write(folder: Path, documents: int, repeats: int = 10) -> tuple[str, ...]:
    """Write documents; return the command without its link and output."""
    (folder / "in").mkdir()
    for number in range(documents):
        (folder / f"in/{number}.txt").write_text(
            f"It was the best of times number {number}, it was the worst of times. " * repeats
        )
    return "summarize", *MODELS, *OFFLOADED, "--input", str(folder / "in")


def concurrency(count: int) -> tuple[str, str]:
    return "--concurrency", str(count)


def expected_summaries(folder: Path, *command: str) -> dict[str, Any]:
    """Return the summaries by id, which do not depend on the link."""
    output = folder / "reference.jsonl"
    assert forked(folder, *command, "--output", str(output)).code == 0
    return {record["id"]: record["summary"] for record in records(output)}


def wait_mid_document(job: Running, output: Path) -> list[dict[str, Any]]:
    """Wait for one more record and the start of the next document; return the records."""
    before = lines(output)
    job.wait_for(lambda: lines(output) > before)
    time.sleep(0.1)
    return records(output)


def kill_rank(number: int, job: Running) -> None:
    rank = job.rank(number)
    assert rank
    rank.kill()


@pytest.mark.parametrize(
    ("number", "count"),
    slow_except([(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)], 2),
)
def test_single_process_exits_on_signal_and_resumes_with_same_seed(
    number: signal.Signals, count: int, tmp_path: Path
) -> None:
    command = (
        *write(tmp_path, documents=3, repeats=20),  # long enough for a prefix on the host
        *concurrency(count),
        "--seed",
        "3",
        "--num-draft-tokens",
        "5",
        "--mode",
        "speculative",  # no inner draft length, which depends on timing
    )
    output = tmp_path / "out.jsonl"
    job = Fork(tmp_path, *command, *SLOW_ALONE, "--output", str(output))
    finished = wait_mid_document(job, output)
    job.send_signal(number)
    result = job.finish(EXIT_TIMEOUT_S)
    assert result.code == 128 + number
    message = (
        f"interrupted ({number.name}); {counted(len(finished), 'finished record')} "
        f"{'is' if len(finished) == 1 else 'are'} safe in {output}: run the same command to resume"
    )
    assert result.err.splitlines()[-1] == message
    assert records(output) == finished
    result = forked(tmp_path, *command, "--output", str(output))
    assert result.code == 0
    assert f"already finished: {len(finished)} of 3 documents" in result.err
    assert all(record in records(output) for record in finished)
    assert [record["id"] for record in records(output)] == ["0.txt", "1.txt", "2.txt"]
    assert {record["id"]: record["summary"] for record in records(output)} == expected_summaries(
        tmp_path, *command
    )


INTERRUPTS = {
    "rank 1": (137, "rank 1 was killed by SIGKILL", TIERFORCE, TWO, partial(kill_rank, 1)),
    "rank 0": (137, "rank 0 was killed by SIGKILL", TIERFORCE, TWO, partial(kill_rank, 0)),
    "SIGINT": (130, "interrupted", TIERFORCE, TWO, lambda job: job.send_signal(signal.SIGINT)),
    "SIGTERM": (143, "interrupted", TIERFORCE, TWO, lambda job: job.send_signal(signal.SIGTERM)),
    "torchrun": (1, "interrupted", TORCHRUN, (), lambda job: job.send_signal(signal.SIGTERM)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "interrupts",
    [["rank 1", "SIGINT"], ["rank 0", "SIGTERM", "torchrun"]],
)
def test_two_ranks_exit_on_any_interrupt_and_resume(interrupts: list[str], tmp_path: Path) -> None:
    count = len(interrupts)
    command = (*write(tmp_path, documents=count + 1), *GREEDY_FP32, *concurrency(1))
    output = tmp_path / "out.jsonl"
    for finished_before, name in enumerate(interrupts):
        code, words, start, ranks, interrupt = INTERRUPTS[name]
        job = Fork(tmp_path, *command, *SLOW, "--output", str(output), *ranks, command=start)
        finished = wait_mid_document(job, output)
        interrupt(job)
        result = job.finish(EXIT_TIMEOUT_S)
        assert result.code == code
        assert any(
            words in line and "run the same command" in line for line in result.err.splitlines()
        ), result.err
        found = f"already finished: {finished_before} of {count + 1} documents"
        assert (found in result.err) == (finished_before > 0)
        assert records(output) == finished
        assert len(finished) == finished_before + 1
    assert forked(tmp_path, *command, "--output", str(output)).code == 0
    assert [record["ranks"] for record in records(output)] == [2] * count + [1]
    assert {record["id"]: record["summary"] for record in records(output)} == expected_summaries(
        tmp_path, *command
    )


def test_output_that_blocks_does_not_keep_the_process() -> None:
    code = (
        "import os, signal, time\n"
        "from decoding.app.terminal import signals\n"
        "signals._PATIENCE_S = 0.2\n"
        "signals.Interrupts(lambda _: time.sleep(600))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(600)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], timeout=EXIT_TIMEOUT_S)
    assert result.returncode == 128 + signal.SIGTERM


def test_interrupt_during_import_is_quiet() -> None:
    job = Job("generate", *MODELS, "--prompt", "It was")
    job.wait_for(
        lambda: any(
            "libtorch" in mapping.path for mapping in psutil.Process(job.process.pid).memory_maps()
        )
    )
    job.send_signal(signal.SIGINT)
    result = job.finish(EXIT_TIMEOUT_S)
    assert result.code in (-signal.SIGINT, 128 + signal.SIGINT)
    assert result.out == ""
    assert result.err in ("", "interrupted (SIGINT)\n")  # before or after signals are handled


@pytest.mark.slow
def test_interrupt_during_rank_startup_is_quiet() -> None:
    job = Job("generate", *MODELS, "--prompt", "It was", *TWO)
    job.wait_for(lambda: job.rank(0) and job.rank(1))
    time.sleep(0.7)
    job.send_signal(signal.SIGINT)
    result = job.finish(EXIT_TIMEOUT_S)
    assert (result.code, result.out) == (128 + signal.SIGINT, "")
    assert result.err in ("", "interrupted (SIGINT)\n")
