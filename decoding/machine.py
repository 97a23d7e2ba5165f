"""What this machine is, as far as drivers and the system tell; and what of it will cost its user most."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pynvml

from offload import host_available
from offload.numa import SYSFS, cpus_of, node_of

_BOOK = 68e9  # bytes of KV of 130,048 tokens of a 7B model


@dataclass(frozen=True)
class Gpu:
    """One GPU, by NVML and sysfs; 0 where NVML does not know."""

    name: str
    memory: int  # bytes
    pcie_generation: int  # now
    pcie_generation_most: int  # of card and slot together
    pcie_width: int
    pcie_width_most: int
    numa_node: int | None
    address: str = ""  # on the PCI bus, as sysfs writes it
    near: bool = True  # whether this process may run on CPUs of its NUMA node
    iommu: str | None = None  # how the kernel maps its copies: identity, or translated in some way; None where it does not say
    peers: tuple[int, ...] = ()  # of NVML's GPUs, those whose memory it reads without the host


@dataclass(frozen=True)
class Machine:
    """The host, and its GPUs."""

    gpus: list[Gpu]
    driver: str  # its version, or why there is none
    cores: int
    usable_cores: int  # of this process
    host_available: int  # bytes that can really be had, cgroups considered
    memlock: int | None  # bytes that may be pinned; None: no limit
    wsl: bool

    @classmethod
    def here(cls) -> Machine:
        gpus, driver = _gpus()
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        version = Path("/proc/version")
        wsl = version.exists() and "microsoft" in version.read_text().lower()
        limit = None if soft == resource.RLIM_INFINITY else soft
        return cls(gpus, driver, os.cpu_count() or 1, len(os.sched_getaffinity(0)), host_available(), limit, wsl)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def at(self, address: str) -> Gpu:
        """Its GPU at a PCI address: NVML counts others, and in another order, than a process sees."""
        unknown = Gpu("unknown to NVML", 0, 0, 0, 0, 0, None, address)
        return next((gpu for gpu in self.gpus if gpu.address == address), unknown)


def warnings(machine: Machine, used: list[Gpu], link_in: float, alone: list[float]) -> list[str]:
    """What costs users most, each with what was found and what to do.

    `machine` as it is while its links are busy; `used`: of its GPUs those of the ranks, by rank, none on a CPU. Rates in bytes a
    second: of the slowest link while all are busy, and of each `alone`.
    """
    found = []
    if not used:
        found.append("no GPU is used: device memory is host memory, and links are copies within it.")
    for index, gpu in enumerate(used):
        if not gpu.memory:
            found.append(f"NVML knows of no GPU {index} at {gpu.address}: its slot and its lanes could not be looked at.")
        if 0 < gpu.pcie_width < 16:
            found.append(
                f"GPU {index} ({gpu.name}) runs on {gpu.pcie_width} PCIe lanes, {gpu.pcie_width_most} at most: with 16 a "
                f"verification would take {gpu.pcie_width / 16:.2f} of the time. Use a slot with 16 lanes that hangs on the CPU."
            )
        if 0 < gpu.pcie_generation < gpu.pcie_generation_most:
            found.append(
                f"GPU {index} ({gpu.name}) runs on PCIe {gpu.pcie_generation} under load, and could on {gpu.pcie_generation_most}: "
                "look for a riser that is too slow, or the slot's speed in the BIOS."
            )
        elif 0 < gpu.pcie_generation_most < 4:
            found.append(f"GPU {index} ({gpu.name}) has PCIe {gpu.pcie_generation_most} at most: half of PCIe 4 or less.")
        if not gpu.near:
            found.append(
                f"GPU {index} ({gpu.name}) hangs on NUMA node {gpu.numa_node}, where this process may not run: its host memory "
                "will lie across the link between the sockets. Start it there (numactl), or let it use all CPUs."
            )
        if gpu.iommu not in (None, "identity"):
            found.append(
                f"copies of GPU {index} ({gpu.name}) are translated by an IOMMU ({gpu.iommu}), which costs bandwidth and may limit "
                "what can be pinned: boot with iommu=pt."
            )
    if len(used) > 1 and min(alone) < 0.8 * max(alone):
        slow = alone.index(min(alone))
        found.append(
            f"GPU {slow} gets {min(alone) / 1e9:.1f} GB/s alone, another {max(alone) / 1e9:.1f}, and all wait for the slowest: use "
            "a slot with as many lanes that hangs on the CPU."
        )
    if len(used) > 1 and link_in < 0.8 * min(alone):
        found.append(
            f"all at once the GPUs get {link_in / 1e9:.1f} GB/s each, one alone {min(alone) / 1e9:.1f}: they share lanes "
            "(a chipset, or a switch). Use slots that hang on the CPU."
        )
    if len({gpu.numa_node for gpu in used if gpu.numa_node is not None}) > 1:
        found.append("the GPUs hang on different NUMA nodes: sums over ranks cross the link between the sockets.")
    if used and machine.wsl:
        found.append("this is WSL2, which pins only part of the host's memory: use Linux itself for texts that exceed it.")
    if used and machine.memlock is not None and machine.memlock < min(_BOOK, machine.host_available):
        found.append(f"only {machine.memlock / 1e9:.1f} GB may be locked, and some drivers heed that: raise it (ulimit -l).")
    if machine.host_available < _BOOK:
        found.append(
            f"{machine.host_available / 1e9:.0f} GB of host memory are available; 130,048 tokens of a 7B model without grouped "
            f"heads take {_BOOK / 1e9:.0f} GB. Plan for shorter texts, or for models with grouped heads."
        )
    return found


def _gpus() -> tuple[list[Gpu], str]:
    """Those that answer, and the driver's version or what is wrong."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no GPU: {error}"
    found, said = [], ""
    try:
        said = _text(pynvml.nvmlSystemGetDriverVersion())
        handles: dict[int, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
                found.append(_gpu(handles[index]))
            except pynvml.NVMLError as error:
                handles.pop(index, None)
                said += f", GPU {index} does not answer: {error}"
        peers = ([other for other in handles if other != index and _reads(handles[index], handles[other])] for index in handles)
        found = [replace(gpu, peers=tuple(reached)) for gpu, reached in zip(found, peers, strict=True)]
    except pynvml.NVMLError as error:
        said += f", which does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()
    return found, said


def iommu_of(address: str, sysfs: Path = SYSFS) -> str | None:
    """How the kernel maps what a device at this PCI address copies; None where there is no IOMMU, or it is not told."""
    try:
        return (sysfs / "bus/pci/devices" / address / "iommu_group/type").read_text().strip() or None
    except OSError:
        return None


def _gpu(handle: Any) -> Gpu:
    domain, _, rest = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    address = f"{domain[-4:]}:{rest}"  # NVML writes the domain with eight digits, sysfs with four
    node = node_of(address)
    cpus = cpus_of(node) if node is not None else set()
    return Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        pcie_generation=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_generation_most=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_width_most=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        numa_node=node,
        address=address,
        near=not cpus or bool(cpus & os.sched_getaffinity(0)),
        iommu=iommu_of(address),
    )


def _reads(handle: Any, other: Any) -> bool:
    """Whether one GPU reads the other's memory without the host, by what the driver says."""
    try:
        return pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_READ) == pynvml.NVML_P2P_STATUS_OK
    except pynvml.NVMLError:
        return False


def _or_zero(ask: Any, handle: Any) -> int:
    try:
        return ask(handle)
    except pynvml.NVMLError:  # cards on other buses have no such thing
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
