"""What this machine is, as far as drivers and the system tell; and what of it will cost its user most."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pynvml

from offload import host_available
from offload.numa import node_of

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


def warnings(machine: Machine, gpus: int, link_in: float, link_in_alone: float) -> list[str]:
    """What costs users most, each with what was found and what to do.

    `machine` as it is while its links are busy; `gpus` of its GPUs are used, 0 for a CPU; rates in bytes a second.
    """
    found, used = [], machine.gpus[:gpus]
    if not gpus:
        found.append("no GPU is used: device memory is host memory, and links are copies within it.")
    for index, gpu in enumerate(used):
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
    if gpus > 1 and link_in < 0.8 * link_in_alone:
        found.append(
            f"all at once the GPUs get {link_in / 1e9:.1f} GB/s each, one alone {link_in_alone / 1e9:.1f}: they share lanes "
            "(a chipset, or a switch). Use slots that hang on the CPU."
        )
    if len({gpu.numa_node for gpu in used}) > 1:
        found.append("the GPUs hang on different NUMA nodes: sums over ranks cross the link between the sockets.")
    if gpus and machine.wsl:
        found.append("this is WSL2, which pins only part of the host's memory: use Linux itself for texts that exceed it.")
    if gpus and machine.memlock is not None and machine.memlock < min(_BOOK, machine.host_available):
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
        for index in range(pynvml.nvmlDeviceGetCount()):
            found.append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)))
    except pynvml.NVMLError as error:
        said += f", GPU {len(found)} does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()
    return found, said


def _gpu(handle: Any) -> Gpu:
    address = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    domain, _, rest = address.partition(":")
    return Gpu(
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        pcie_generation=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_generation_most=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_or_zero(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_width_most=_or_zero(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        numa_node=node_of(f"{domain[-4:]}:{rest}"),  # NVML writes the domain with eight digits, sysfs with four
    )


def _or_zero(ask: Any, handle: Any) -> int:
    try:
        return ask(handle)
    except pynvml.NVMLError:  # cards on other buses have no such thing
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
