"""Unresponsive ranks are reported once, and so is their return; rank 0 may make others wait."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr

import pytest
import torch
from torch.distributed import TCPStore

from parallel.ranks import watchdog
from parallel.ranks.process_group import TensorParallelGroup
from parallel.ranks.watchdog import Watchdog
from support.ranks import free_port, run_ranks

SILENT_S = 0.8


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition never became true")


class Ranks:
    """The watchdogs of three ranks in one process, and their warnings as (rank, line)."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", free_port(), 1, is_master=True)
        self.warnings: list[tuple[int, str]] = []
        self.dogs = [
            Watchdog(
                rank,
                3,
                self.store,
                lambda line, rank=rank: self.warnings.append((rank, line)),  # type: ignore[misc]
                SILENT_S,
            )
            for rank in range(3)
        ]


@pytest.fixture
def groups() -> Iterator[Callable[[], Ranks]]:
    """A function that makes groups of ranks, whose watchdogs end with the test."""
    made: list[Ranks] = []

    def make() -> Ranks:
        made.append(Ranks())
        return made[-1]

    yield make
    for ranks in made:
        for dog in ranks.dogs:
            dog._stopped.set()


@pytest.fixture
def ranks(groups: Callable[[], Ranks]) -> Ranks:
    return groups()


def test_the_lowest_running_rank_reports_a_silent_one(
    groups: Callable[[], Ranks],
) -> None:
    cases = [(groups(), silent, speaker) for silent, speaker in ((2, 0), (1, 0), (0, 1))]
    for ranks, silent, _ in cases:
        for rank, dog in enumerate(ranks.dogs):
            if rank != silent:
                dog.start()
    wait_for(lambda: all(ranks.warnings for ranks, _, _ in cases))
    time.sleep(2 * SILENT_S)  # long enough for a second warning
    for ranks, silent, speaker in cases:
        [(who, line)] = ranks.warnings
        assert who == speaker
        assert line.startswith(f"rank {silent} has not answered for 1 s: its process is stopped")
        ranks.dogs[silent].start()
    wait_for(lambda: all(len(ranks.warnings) > 1 for ranks, _, _ in cases))
    for ranks, silent, speaker in cases:
        assert ranks.warnings[1:] == [(speaker, f"rank {silent} has resumed.")]


def test_a_running_rank_that_misses_a_collective_is_reported(ranks: Ranks) -> None:
    for dog in ranks.dogs:
        dog.start()
    for dog in ranks.dogs[:2]:
        dog.arrive()
    wait_for(lambda: ranks.warnings)
    [(who, line)] = ranks.warnings
    assert who == 0
    assert line.startswith(
        "rank 2 is running, but for 1 s has not reached the collective in which rank 0"
    )
    ranks.dogs[2].arrive()
    wait_for(lambda: len(ranks.warnings) > 1)
    assert ranks.warnings[1:] == [(0, "rank 2 has resumed.")]


@pytest.mark.slow
def test_a_waiting_rank_0_and_leaving_ranks_are_not_reported(ranks: Ranks) -> None:
    for dog in ranks.dogs:
        dog.start()
    for dog in ranks.dogs[1:]:
        dog.arrive()
    time.sleep(2 * SILENT_S)
    ranks.dogs[1].stop()
    ranks.dogs[2].leave()
    ranks.dogs[0].arrive()
    ranks.dogs[2].arrive()
    time.sleep(2 * SILENT_S)
    assert ranks.warnings == []


def stop_rank_1() -> list[str]:
    watchdog.SILENT_S = 3.0  # long enough for two processes on one core
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        group = TensorParallelGroup.from_environment("cpu")
        pids = group.gather(os.getpid())
        if group.rank == 0:

            def resume() -> None:
                wait_for(lambda: "rank 1 has not answered" in stderr.getvalue())
                os.kill(pids[1], signal.SIGCONT)

            threading.Thread(target=resume).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        assert group.all_reduce(torch.ones(1)).item() == 2
        if group.rank == 0:
            wait_for(lambda: "rank 1 has resumed." in stderr.getvalue())
        group.broadcast(0)
        group.close()
    return stderr.getvalue().splitlines()


@pytest.mark.slow
def test_a_stopped_process_is_reported_and_may_resume() -> None:
    first, second = run_ranks(2, stop_rank_1)
    assert len(first) == 2, first
    assert first[0].startswith("warning: rank 1 has not answered for 3 s")
    assert first[1] == "warning: rank 1 has resumed."
    assert second == []  # rank 1 itself
