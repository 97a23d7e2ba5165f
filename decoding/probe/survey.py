"""What this machine is made of, as far as drivers and the system tell."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pynvml

from offload.memory.host import host_available
from offload.memory.numa import SYSFS, cpus_of, node_of


@dataclass(frozen=True)
class Gpu:
    """One GPU, by NVML and sysfs; 0 where NVML does not know."""

    name: str
    memory: int  # bytes
    pcie_generation: int  # now
    max_pcie_generation: int  # of card and slot together
    pcie_width: int
    max_pcie_width: int
    numa_node: int | None
    address: str = ""  # on the PCI bus, as sysfs writes it
    nearby: bool = True  # whether this process may run on CPUs of its NUMA node
    # how the kernel maps its copies: identity, or translated; None where it does not say
    iommu: str | None = None
    peers: tuple[int, ...] = ()  # of NVML's GPUs, those whose memory it reads without the host


@dataclass(frozen=True)
class Machine:
    """The host and its GPUs."""

    gpus: list[Gpu]
    driver: str  # its version, or why there is none
    cores: int
    usable_cores: int  # of this process
    host_available: int  # bytes that can really be had, cgroups considered
    memlock: int | None  # bytes that may be pinned; None: no limit
    wsl: bool

    @classmethod
    def detect(cls) -> Machine:
        """Look at the machine that this process runs on."""
        gpus, driver = _gpus()
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        version = Path("/proc/version")
        wsl = version.exists() and "microsoft" in version.read_text().lower()
        limit = None if soft == resource.RLIM_INFINITY else soft
        return cls(
            gpus,
            driver,
            os.cpu_count() or 1,
            len(os.sched_getaffinity(0)),
            host_available(),
            limit,
            wsl,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for a JSON file."""
        return asdict(self)

    def at(self, address: str) -> Gpu:
        """Return the GPU at a PCI address.

        NVML counts other GPUs than a process sees, and in another order.
        """
        unknown = Gpu("unknown to NVML", 0, 0, 0, 0, 0, None, address)
        return next((gpu for gpu in self.gpus if gpu.address == address), unknown)


def _gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs that answer, and the driver's version or what is wrong with it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no GPU: {error}"
    gpus: list[Gpu] = []
    said = ""
    try:
        said = _text(pynvml.nvmlSystemGetDriverVersion())
        handles: dict[int, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_gpu(handles[index]))
            except pynvml.NVMLError as error:
                handles.pop(index, None)
                said += f", GPU {index} does not answer: {error}"
        for place, (index, handle) in enumerate(handles.items()):
            reached = [
                other
                for other, its_handle in handles.items()
                if other != index and _reads(handle, its_handle)
            ]
            gpus[place] = replace(gpus[place], peers=tuple(reached))
    except pynvml.NVMLError as error:
        said += f", which does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()
    return gpus, said


def iommu_of(address: str, sysfs: Path = SYSFS) -> str | None:
    """Return how the kernel maps the copies of the device at this PCI address.

    None where there is no IOMMU, or the system does not tell.
    """
    kind = sysfs / "bus/pci/devices" / address / "iommu_group/type"
    try:
        return kind.read_text().strip() or None
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
        max_pcie_generation=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_pcie_width=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        numa_node=node,
        address=address,
        nearby=not cpus or bool(cpus & os.sched_getaffinity(0)),
        iommu=iommu_of(address),
    )


def _reads(handle: Any, other: Any) -> bool:
    """Return whether one GPU reads the other's memory without the host, as the driver says."""
    try:
        return (
            pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
            == pynvml.NVML_P2P_STATUS_OK
        )
    except pynvml.NVMLError:
        return False


def _or_zero(ask: Any, handle: Any) -> int:
    try:
        return ask(handle)
    except pynvml.NVMLError:  # cards on other buses have no such thing
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
