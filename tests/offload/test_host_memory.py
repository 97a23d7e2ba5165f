"""Host memory is given in large pieces, and all of it before it is pinned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload import host_memory
from offload.host_memory import allocate, touch


def resident() -> int:
    """Return the bytes of this process in memory, to the page.

    The count that the kernel keeps beside them lags by some pages for each processor.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (line,) = (each for each in rollup.splitlines() if each.startswith("Rss:"))
    return int(line.split()[1]) << 10


def test_all_of_a_new_buffer_is_there_once_it_was_touched() -> None:
    buffer = allocate(64 << 20, torch.uint8)
    before = resident()
    touch(buffer)
    if resident() - before < 1 << 20:
        pytest.skip("this kernel is older than MADV_POPULATE_WRITE")
    assert resident() - before > 60 << 20


@pytest.mark.parametrize("numel", [0, 1, 1000, 3_000_001])
def test_what_stands_in_a_buffer_stays(numel: int) -> None:
    buffer = allocate(numel, torch.int16)
    want = torch.randint(0, 1000, (numel,), dtype=torch.int16)
    buffer.copy_(want)
    touch(buffer)
    assert torch.equal(buffer, want)


def test_threads_that_touch_it_run_where_their_caller_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go to the node of the thread that is the first to touch them."""
    seen: list[tuple[set[int], int]] = []
    monkeypatch.setattr(
        host_memory,
        "_advise",
        lambda address, nbytes, advice: seen.append((os.sched_getaffinity(0), nbytes)),
    )
    buffer, every = torch.empty(10_000, dtype=torch.uint8), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(every)})
        touch(buffer)
    finally:
        os.sched_setaffinity(0, every)
    assert seen == [({min(every)}, 10_000)]
    touch(buffer)
    assert sum(nbytes for _, nbytes in seen[1:]) == 10_000
    assert len(seen[1:]) == min(8, len(every))
