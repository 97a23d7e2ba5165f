"""Interrupted in the middle of a document, whichever way: all ends, what was finished is intact,
and the same command goes on.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands import (
    MODELS,
    STEADY,
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

SOON = 30.0  # seconds in which all processes of an interrupted job have to be gone
OFFLOADED = ("--gpu-kv-layers", "0", "--max-new-tokens", "16", "--retrieval-budget", "4096")
# a second or so for a document, of which two ranks have half each; nearly all of it is waiting
SLOW, SLOW_ALONE = ("--link", "emulated:0.004"), ("--link", "emulated:0.008")
TWO = ("--gpus", "2")


def write(folder: Path, documents: int) -> tuple[str, ...]:
    """Write documents; returns the command less its link and output."""
    (folder / "in").mkdir()
    for number in range(documents):
        (folder / f"in/{number}.txt").write_text(
            f"It was the best of times number {number}, it was the worst of times. " * 10
        )
    return "summarize", *MODELS, *OFFLOADED, "--input", str(folder / "in")


def concurrency(count: int) -> tuple[str, str]:
    return "--concurrency", str(count)


def uninterrupted(folder: Path, *command: str) -> dict[str, Any]:
    """Return the summaries by id, which are the same over any link."""
    output = folder / "reference.jsonl"
    assert forked(folder, *command, "--output", str(output)).code == 0
    return {record["id"]: record["summary"] for record in records(output)}


def in_the_middle(job: Running, output: Path) -> list[dict[str, Any]]:
    """Wait for one more record, and for the next document to be under way. The records so far."""
    before = lines(output)
    job.wait_for(lambda: lines(output) > before)
    time.sleep(0.1)
    return records(output)


def kill_rank(number: int, job: Running) -> None:
    rank = job.rank(number)
    assert rank
    rank.kill()


@pytest.mark.parametrize(
    ("number", "texts"),
    slow_except([(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)], 2),
)
def test_a_single_process_ends_at_a_signal_and_goes_on_with_the_same_seed(
    number: signal.Signals, texts: int, tmp_path: Path
) -> None:
    command = (
        *write(tmp_path, documents=3),
        *concurrency(texts),
        "--seed",
        "3",
        "--num-draft-tokens",
        "5",
        "--mode",
        "speculative",  # has no other length, which would go by the clock
    )
    output = tmp_path / "out.jsonl"
    job = Fork(tmp_path, *command, *SLOW_ALONE, "--output", str(output))
    finished = in_the_middle(job, output)
    job.send_signal(number)
    result = job.finish(SOON)
    assert result.code == 128 + number
    last = (
        f"interrupted ({number.name}); {len(finished)} finished records are safe in {output}: run "
        "the same command to go on"
    )
    assert result.err.splitlines()[-1] == last
    assert records(output) == finished
    result = forked(tmp_path, *command, "--output", str(output))
    assert result.code == 0
    assert result.err.count("finished before, skipped") == len(finished)
    assert records(output)[: len(finished)] == finished
    assert {record["id"]: record["summary"] for record in records(output)} == uninterrupted(
        tmp_path, *command
    )


INTERRUPTS = {
    "rank 1": (137, "rank 1 was killed by SIGKILL", TIERFORCE, TWO, partial(kill_rank, 1)),
    "rank 0": (137, "rank 0 was killed by SIGKILL", TIERFORCE, TWO, partial(kill_rank, 0)),
    "SIGINT": (130, "interrupted", TIERFORCE, TWO, lambda job: job.send_signal(signal.SIGINT)),
    "SIGTERM": (143, "interrupted", TIERFORCE, TWO, lambda job: job.send_signal(signal.SIGTERM)),
    "torchrun": (1, "interrupted", TORCHRUN, (), lambda job: job.send_signal(signal.SIGTERM)),
}


@pytest.mark.parametrize(
    "interrupts",
    slow_except(
        [pytest.param(["rank 1", "SIGINT"]), pytest.param(["rank 0", "SIGTERM", "torchrun"])]
    ),
)
def test_two_ranks_end_whatever_happens_to_them_and_go_on(
    interrupts: list[str], tmp_path: Path
) -> None:
    count = len(interrupts)
    command = (*write(tmp_path, documents=count + 1), *STEADY, *concurrency(1))
    output = tmp_path / "out.jsonl"
    for finished_before, name in enumerate(interrupts):
        code, words, start, how, interrupt = INTERRUPTS[name]
        job = Fork(tmp_path, *command, *SLOW, "--output", str(output), *how, command=start)
        finished = in_the_middle(job, output)
        interrupt(job)
        result = job.finish(SOON)
        assert result.code == code
        assert any(
            words in line and "run the same command" in line for line in result.err.splitlines()
        ), result.err
        assert result.err.count("finished before, skipped") == finished_before
        assert records(output) == finished
        assert len(finished) == finished_before + 1
    assert forked(tmp_path, *command, "--output", str(output)).code == 0
    assert [record["ranks"] for record in records(output)] == [2] * count + [1]
    assert {record["id"]: record["summary"] for record in records(output)} == uninterrupted(
        tmp_path, *command
    )


def test_an_interrupt_while_the_program_loads_is_quiet() -> None:
    job = Job("generate", *MODELS, "--prompt", "It was")
    job.wait_for(
        lambda: any(
            "libtorch" in part.path for part in psutil.Process(job.process.pid).memory_maps()
        )
    )
    job.send_signal(signal.SIGINT)
    result = job.finish(SOON)
    assert result.code in (-signal.SIGINT, 128 + signal.SIGINT)
    assert result.out == ""
    assert result.err in ("", "interrupted (SIGINT)\n")  # it may listen by then, or not yet


@pytest.mark.slow
def test_an_interrupt_while_the_ranks_load_is_quiet() -> None:
    job = Job("generate", *MODELS, "--prompt", "It was", *TWO)
    job.wait_for(lambda: job.rank(0) and job.rank(1))
    time.sleep(0.7)
    job.send_signal(signal.SIGINT)
    result = job.finish(SOON)
    assert (result.code, result.out) == (128 + signal.SIGINT, "")
    assert result.err in ("", "interrupted (SIGINT)\n")
