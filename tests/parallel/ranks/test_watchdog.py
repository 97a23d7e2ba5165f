"""A rank that stands still is named, once, and so is its return; one that others wait for on
purpose is not.
"""

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
    raise AssertionError("it never came to that")


class Ranks:
    """Three ranks' watchdogs in one process, and what they said."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", free_port(), 1, is_master=True)
        self.said: list[tuple[int, str]] = []
        self.dogs = [
            Watchdog(
                rank,
                3,
                self.store,
                lambda line, rank=rank: self.said.append((rank, line)),  # type: ignore[misc]
                SILENT_S,
            )
            for rank in range(3)
        ]

    def about(self, rank: int) -> list[tuple[int, str]]:
        return [(who, line) for who, line in self.said if line.startswith(f"rank {rank} ")]


@pytest.fixture
def groups() -> Iterator[Callable[[], Ranks]]:
    """Make groups of ranks, whose watchdogs end with the test."""
    made: list[Ranks] = []

    def make() -> Ranks:
        made.append(Ranks())
        return made[-1]

    yield make
    for ranks in made:
        for dog in ranks.dogs:
            dog._over.set()


@pytest.fixture
def ranks(groups: Callable[[], Ranks]) -> Ranks:
    return groups()


def test_the_lowest_rank_that_runs_names_the_one_that_does_not(
    groups: Callable[[], Ranks],
) -> None:
    cases = [(groups(), silent, speaker) for silent, speaker in ((2, 0), (1, 0), (0, 1))]
    for ranks, silent, _ in cases:
        for rank, dog in enumerate(ranks.dogs):
            if rank != silent:
                dog.start()
    wait_for(lambda: all(ranks.said for ranks, _, _ in cases))
    time.sleep(2 * SILENT_S)  # it is said once
    for ranks, silent, speaker in cases:
        [(who, line)] = ranks.said
        assert who == speaker
        assert line.startswith(f"rank {silent} has not answered for 1 s: its process is stopped")
        ranks.dogs[silent].start()
    wait_for(lambda: all(len(ranks.said) > 1 for ranks, _, _ in cases))
    for ranks, silent, speaker in cases:
        assert ranks.said[1:] == [(speaker, f"rank {silent} goes on.")]


def test_a_rank_that_runs_and_does_not_come_is_named(ranks: Ranks) -> None:
    for dog in ranks.dogs:
        dog.start()
    for dog in ranks.dogs[:2]:
        dog.arrive()
    wait_for(lambda: ranks.said)
    [(who, line)] = ranks.said
    assert who == 0
    assert line.startswith("rank 2 runs, but for 1 s has not come to where rank 0 waits")
    ranks.dogs[2].arrive()
    wait_for(lambda: len(ranks.said) > 1)
    assert ranks.said[1:] == [(0, "rank 2 goes on.")]


@pytest.mark.slow
def test_rank_0_may_keep_the_others_waiting_and_any_may_leave(ranks: Ranks) -> None:
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
    assert ranks.said == []


def stand_still() -> list[str]:
    watchdog.SILENT_S = 3.0  # two processes may wait for each other's core
    said = io.StringIO()
    with redirect_stderr(said):
        group = TensorParallelGroup.from_environment("cpu")
        pids = group.gather(os.getpid())
        if group.rank == 0:

            def go_on() -> None:
                wait_for(lambda: "rank 1 has not answered" in said.getvalue())
                os.kill(pids[1], signal.SIGCONT)

            threading.Thread(target=go_on).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        assert group.all_reduce(torch.ones(1)).item() == 2
        if group.rank == 0:
            wait_for(lambda: "rank 1 goes on." in said.getvalue())
        group.broadcast(0)
        group.close()
    return said.getvalue().splitlines()


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named_and_its_job_goes_on() -> None:
    first, second = run_ranks(2, stand_still)
    assert len(first) == 2, first
    assert first[0].startswith("warning: rank 1 has not answered for 3 s")
    assert first[1] == "warning: rank 1 goes on."
    assert second == []  # it was itself the one
