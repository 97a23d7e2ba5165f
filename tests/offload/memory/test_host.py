"""Host memory is given in large pieces, and all of it before it is pinned."""

from __future__ import annotations

import ctypes
import os
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from offload.memory import host as host_memory
from offload.memory.cuda_link import CudaLink
from offload.memory.host import allocate, host_available, prefault
from standin import standin


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
    prefault(buffer)
    if resident(buffer) == before:
        pytest.skip("this kernel is older than MADV_POPULATE_WRITE")
    assert before < 1 << 20
    assert resident(buffer) > 60 << 20


@pytest.mark.parametrize("numel", [0, 1, 1000, 3_000_001])
def test_what_stands_in_a_buffer_stays(numel: int) -> None:
    buffer = allocate(numel, torch.int16)
    want = torch.randint(0, 1000, (numel,), dtype=torch.int16)
    buffer.copy_(want)
    prefault(buffer)
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
        prefault(buffer)
    finally:
        os.sched_setaffinity(0, every)
    assert seen == [({min(every)}, 10_000)]
    prefault(buffer)
    assert sum(nbytes for _, nbytes in seen[1:]) == 10_000
    assert len(seen[1:]) == min(8, len(every))


# a limit of 3 GB, of which 2.5 are used: 2 by files that were read, and half a GB by programs
CGROUPS = {
    "": {
        "memory.max": "3000000000",
        "memory.current": "2500000000",
        "memory.stat": "anon 500000000\ninactive_file 1200000000\nactive_file 800000000\n",
    },
    "memory": {
        "memory.limit_in_bytes": "3000000000",
        "memory.usage_in_bytes": "2500000000",
        "memory.stat": "inactive_file 1\ntotal_inactive_file 1200000000\n"
        "total_active_file 800000000\n",
    },
}


@pytest.mark.parametrize("version", CGROUPS)
@pytest.mark.parametrize("inside", [".", "a.slice", "a.slice/b.scope"])
def test_files_in_the_page_cache_take_nothing_of_a_containers_limit(
    version: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the limit is that of the process's cgroup, or of one above it."""
    free = 1 << 40
    monkeypatch.setattr(
        host_memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free})
    )
    own = tmp_path / "own"
    own.write_text("5:cpu,memory:/a.slice/b.scope\n1:cpuset:/\n0::/a.slice/b.scope\n")
    assert host_available(tmp_path, own) == free
    folder = tmp_path / version / inside
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in CGROUPS[version].items():
        (folder / name).write_text(text)
    assert host_available(tmp_path, own) == 2_500_000_000
    assert host_available(tmp_path, tmp_path / "none") == (2_500_000_000 if inside == "." else free)
    (folder / "memory.stat").unlink()
    assert host_available(tmp_path, own) == 500_000_000


def is_kept_from_forks(buffer: torch.Tensor) -> bool:
    """Return whether the kernel copies no page of a buffer to a process that forks off."""
    middle = buffer.data_ptr() + buffer.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, rest = line.split()[0].partition("-")
        if dash:
            inside = int(first, 16) <= middle < int(rest, 16)
        elif inside and line.startswith("VmFlags:"):
            return "dc" in line.split()
    raise AssertionError("no such memory")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a stand-in")
def test_pinned_memory_is_not_copied_to_forks_until_it_is_freed() -> None:
    with standin():
        link = CudaLink(torch.device("cuda", 0))
        buffer = link.host_empty(64 << 20, torch.uint8)
        assert is_kept_from_forks(buffer)
        link.release(buffer)
        assert not is_kept_from_forks(buffer)
        link.close()
