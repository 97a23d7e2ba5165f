"""Host memory is given in large pieces, and all of it before it is pinned."""

from __future__ import annotations

import ctypes
import os
from mmap import PAGESIZE

import pytest
import torch

from offload import host_memory
from offload.host_memory import allocate, touch


def resident(buffer: torch.Tensor) -> int:
    """Return the bytes of whole pages of a buffer that are in memory.

    What else the process holds may leave memory meanwhile.
    """
    first = -(-buffer.data_ptr() // PAGESIZE)
    pages = (buffer.data_ptr() + buffer.nbytes) // PAGESIZE - first
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    place, nbytes = ctypes.c_void_p(first * PAGESIZE), ctypes.c_size_t(pages * PAGESIZE)
    assert libc.mincore(place, nbytes, there) == 0, os.strerror(ctypes.get_errno())
    return PAGESIZE * sum(each & 1 for each in there)


def test_all_of_a_new_buffer_is_there_once_it_was_touched() -> None:
    buffer = allocate(64 << 20, torch.uint8)
    before = resident(buffer)
    touch(buffer)
    if resident(buffer) == before:
        pytest.skip("this kernel is older than MADV_POPULATE_WRITE")
    assert before < 1 << 20
    assert resident(buffer) > 60 << 20


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
