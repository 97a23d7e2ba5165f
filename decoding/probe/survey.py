"""Hardware survey from drivers and the operating system."""

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
    """One GPU from NVML and sysfs; unknown numbers are 0."""

    name: str
    memory: int  # bytes
    pcie_generation: int  # current
    max_pcie_generation: int  # supported by card and slot
    pcie_width: int
    max_pcie_width: int
    numa_node: int | None
    address: str = ""  # PCI address in sysfs notation
    nearby: bool = True  # whether this process may run on CPUs of its NUMA node
    # the kernel's IOMMU domain type: identity, or a translated one; None if unknown
    iommu: str | None = None
    peers: tuple[int, ...] = ()  # NVML indices of GPUs with direct peer access
    free: int = 0  # bytes that no process has allocated
    uuid: str = ""
    is_divided: bool = False  # into instances (MIG)


@dataclass(frozen=True)
class Machine:
    """The host and its GPUs."""

    gpus: list[Gpu]
    driver: str  # version, or the reason why there is none; GPUs that do not respond
    cores: int
    usable_cores: int  # allowed for this process
    host_available: int  # bytes, within cgroup limits
    memlock: int | None  # bytes that may be pinned; None: no limit
    wsl: bool
    has_problem: bool = False  # whether the driver or a GPU does not respond

    @classmethod
    def detect(cls) -> Machine:
        """Survey the machine that this process runs on."""
        gpus, driver, has_problem = _gpus()
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
            has_problem,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what a JSON file may tell others: no serial numbers."""
        fields = asdict(self)
        for gpu in fields["gpus"]:
            del gpu["uuid"]
        return fields

    def gpu_at(self, address: str) -> Gpu:
        """Return the GPU at a PCI address.

        NVML may list other GPUs than the process sees, in another order.
        """
        unknown = Gpu("unknown to NVML", 0, 0, 0, 0, 0, None, address)
        return next((gpu for gpu in self.gpus if gpu.address == address), unknown)


def _gpus() -> tuple[list[Gpu], str, bool]:
    """Return the responding GPUs, the driver version or its error, and whether one is missing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # most machines without a GPU have no driver's library
        return [], f"no GPU: {error}", error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    gpus: list[Gpu] = []
    version = status = ""
    try:
        version = status = _text(pynvml.nvmlSystemGetDriverVersion())
        handles: dict[int, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_gpu(handles[index]))
            except pynvml.NVMLError as error:
                handles.pop(index, None)
                status += f", GPU {index} does not respond: {error}"
        for position, (index, handle) in enumerate(handles.items()):
            peers = [
                other
                for other, other_handle in handles.items()
                if other != index and _has_peer_access(handle, other_handle)
            ]
            gpus[position] = replace(gpus[position], peers=tuple(peers))
    except pynvml.NVMLError as error:
        status += f", which does not respond: {error}"
    finally:
        pynvml.nvmlShutdown()
    return gpus, status, status != version


def iommu_of(address: str, sysfs: Path = SYSFS) -> str | None:
    """Return the IOMMU domain type of the device at this PCI address.

    None without an IOMMU, or if the system does not expose the type.
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
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory=memory.total,
        pcie_generation=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        max_pcie_generation=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_pcie_width=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        numa_node=node,
        address=address,
        nearby=not cpus or bool(cpus & os.sched_getaffinity(0)),
        iommu=iommu_of(address),
        free=memory.free,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        is_divided=_is_divided(handle),
    )


def _is_divided(handle: Any) -> bool:
    """Return whether the GPU is in MIG mode, which few have."""
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    except pynvml.NVMLError:
        return False


def _has_peer_access(handle: Any, other: Any) -> bool:
    """Return whether the driver reports direct access of one GPU to the other's memory."""
    try:
        return (
            pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
            == pynvml.NVML_P2P_STATUS_OK
        )
    except pynvml.NVMLError:
        return False


def _or_zero(query: Any, handle: Any) -> int:
    try:
        return query(handle)
    except pynvml.NVMLError:  # not supported by cards on other buses
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
