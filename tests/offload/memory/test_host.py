"""Host memory: allocation, prefaulting before pinning, and what is available."""

from __future__ import annotations

import ctypes
import os
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path

import pytest
import torch

from offload.memory import host as host_memory
from offload.memory.cuda_link import CudaLink
from offload.memory.host import allocate, host_available, prefault
from standin import standin


def resident_bytes(buffer: torch.Tensor) -> int:
    """Return the bytes of a buffer's whole pages that are resident.

    Unlike the process's resident set, it does not depend on other memory being paged out.
    """
    first = -(-buffer.data_ptr() // PAGESIZE)
    pages = (buffer.data_ptr() + buffer.nbytes) // PAGESIZE - first
    is_resident = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(first * PAGESIZE)
    nbytes = ctypes.c_size_t(pages * PAGESIZE)
    assert libc.mincore(address, nbytes, is_resident) == 0, os.strerror(ctypes.get_errno())
    return PAGESIZE * sum(flags & 1 for flags in is_resident)


def test_prefault_makes_a_new_buffer_resident() -> None:
    # from the kernel, since malloc may hand out memory that an earlier test had, still resident
    mapping = mmap(-1, 64 << 20, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    before = resident_bytes(buffer)
    prefault(buffer)
    if resident_bytes(buffer) == before:
        pytest.skip("this kernel is older than MADV_POPULATE_WRITE")
    assert before < 4 << 20  # a huge page at either end, which other memory may share
    assert resident_bytes(buffer) > 60 << 20


@pytest.mark.parametrize("numel", [0, 1, 1000, 3_000_001])
def test_prefault_keeps_the_contents(numel: int) -> None:
    buffer = allocate(numel, torch.int16)
    expected = torch.randint(0, 1000, (numel,), dtype=torch.int16)
    buffer.copy_(expected)
    prefault(buffer)
    assert torch.equal(buffer, expected)


def test_prefault_threads_inherit_the_callers_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are allocated on the node of the thread that first accesses them."""
    calls: list[tuple[set[int], int]] = []
    monkeypatch.setattr(
        host_memory,
        "_advise",
        lambda address, nbytes, advice: calls.append((os.sched_getaffinity(0), nbytes)),
    )
    buffer = torch.empty(10_000, dtype=torch.uint8)
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        prefault(buffer)
    finally:
        os.sched_setaffinity(0, cpus)
    assert calls == [({min(cpus)}, 10_000)]
    prefault(buffer)
    assert sum(nbytes for _, nbytes in calls[1:]) == 10_000
    assert len(calls[1:]) == min(8, len(cpus))


# a limit of 3 GB, of which 2.5 GB are used: 2 GB of page cache and 0.5 GB of programs
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
def test_page_cache_does_not_count_towards_a_cgroup_limit(
    version: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit may be that of the process's cgroup or of a parent."""
    free = 1 << 40
    monkeypatch.setattr(
        host_memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free})
    )
    own = tmp_path / "own"
    own.write_text("5:cpu,memory:/a.slice/b.scope\n1:cpuset:/\n0::/a.slice/b.scope\n")
    assert host_available(tmp_path, own) == free
    folder = tmp_path / version / inside
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CGROUPS[version].items():
        (folder / name).write_text(content)
    assert host_available(tmp_path, own) == 2_500_000_000
    assert host_available(tmp_path, tmp_path / "none") == (2_500_000_000 if inside == "." else free)
    (folder / "memory.stat").unlink()
    assert host_available(tmp_path, own) == 500_000_000


def is_excluded_from_forks(buffer: torch.Tensor) -> bool:
    """Return whether the kernel excludes a buffer's pages from forked processes."""
    middle = buffer.data_ptr() + buffer.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, rest = line.split()[0].partition("-")
        if dash:
            inside = int(first, 16) <= middle < int(rest, 16)
        elif inside and line.startswith("VmFlags:"):
            return "dc" in line.split()
    raise AssertionError("the buffer is not mapped")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the stand-in GPU")
def test_pinned_memory_is_excluded_from_forks_until_it_is_freed() -> None:
    with standin():
        link = CudaLink(torch.device("cuda", 0))
        buffer = link.host_empty(64 << 20, torch.uint8)
        assert is_excluded_from_forks(buffer)
        link.release(buffer)
        assert not is_excluded_from_forks(buffer)
        link.close()
