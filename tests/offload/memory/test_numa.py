"""The NUMA node of a GPU, and allocation on a node by first access."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from offload.memory.numa import cpus_of, node_of, on_node

NODES = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A sysfs of two nodes and two GPUs; the node of a third device is not known."""
    for address, node in (("0000:01:00.0", "0"), ("0000:41:00.0", "1"), ("0000:81:00.0", "-1")):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(node + "\n")
    for node, cpus in enumerate(("0-3,8-11", "4,12\n")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cpus)
    return tmp_path


def test_node_of_a_device(sysfs: Path) -> None:
    nodes = [
        node_of(address, sysfs)
        for address in ("0000:01:00.0", "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0")
    ]
    assert nodes == [0, 1, None, None]


def test_cpus_of_a_node(sysfs: Path) -> None:
    assert [cpus_of(node, sysfs) for node in range(3)] == [
        {0, 1, 2, 3, 8, 9, 10, 11},
        {4, 12},
        set(),
    ]
    (sysfs / "devices/system/node/node1/cpulist").write_text("four")
    assert cpus_of(1, sysfs) == set()


def test_on_node_sets_and_restores_the_affinity(sysfs: Path) -> None:
    before = os.sched_getaffinity(0)
    (sysfs / "devices/system/node/node0/cpulist").write_text(str(min(before)))
    with on_node(0, sysfs):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("node", [None, 1, 7])
def test_on_node_does_nothing_without_usable_cpus(node: int | None, sysfs: Path) -> None:
    before = os.sched_getaffinity(0)
    (sysfs / "devices/system/node/node1/cpulist").write_text(str(max(before) + 1))
    with on_node(node, sysfs):
        assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(NODES) < 2, reason="one NUMA node")
@pytest.mark.parametrize("node", [int(path.name.removeprefix("node")) for path in NODES])
def test_memory_first_accessed_on_a_node_is_allocated_there(node: int) -> None:
    if not cpus_of(node) & os.sched_getaffinity(0):
        pytest.skip(f"none of node {node}'s CPUs may be used")
    with on_node(node):
        buffer = torch.empty(64 << 20, dtype=torch.uint8)
        ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)
    pages = pages_by_node(buffer.data_ptr() + buffer.nbytes // 2)
    assert pages[node] > 0.95 * sum(pages.values())


def pages_by_node(address: int) -> dict[int, int]:
    """Return the pages per node of the mapping of an address, from /proc/self/numa_maps."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    _, fields = max((int(line[0], 16), line[1:]) for line in lines if int(line[0], 16) <= address)
    return {
        int(field[1:].split("=")[0]): int(field.split("=")[1])
        for field in fields
        if field[0] == "N" and field[1].isdigit()
    }
