"""Host memory on the GPU's NUMA node.

Copies from another node would cross the link between the sockets first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SYSFS = Path("/sys")


def gpu_address(device: torch.device) -> str:
    """Return the PCI address of a GPU, as sysfs writes it."""
    import torch

    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def gpu_node(device: torch.device, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of a GPU; None if the system has only one, or does not report it."""
    return node_of(gpu_address(device), sysfs)


def node_of(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of a PCI address (0000:01:00.0); None if it is not known."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int, sysfs: Path = SYSFS) -> set[int]:
    """Return the CPUs of a node; an empty set if they are not known."""
    try:
        ranges = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
        cpus: set[int] = set()
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
        return cpus
    except (OSError, ValueError):
        return set()


@contextmanager
def on_node(node: int | None, sysfs: Path = SYSFS) -> Iterator[None]:
    """Run this thread on a node: pages that it accesses first are allocated there, if they fit.

    Does nothing if `node` is None, or if this process may use none of its CPUs.
    """
    before = os.sched_getaffinity(0)
    cpus = before & cpus_of(node, sysfs) if node is not None else set()
    with suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
