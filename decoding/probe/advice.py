"""Warnings about the most expensive hardware problems, each with a remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator

from decoding.probe.survey import Gpu, Machine

_BOOK_BYTES = 68e9  # KV of 130,048 tokens of a 7B model
_SLOW_ALL_REDUCE = 0.25  # share of the link rate below which all-reduces are reported as slow
COPY_ENGINES = "NCCL_SHM_USE_CUDA_MEMCPY"  # NCCL's setting
_SHARED_LANES = 0.8  # share of another link's rate below which a link is reported as slow


def warnings(machine: Machine, used: list[Gpu], link_in: float, alone: list[float]) -> list[str]:
    """Return warnings about the machine, each with the finding and a remedy.

    Args:
        machine: surveyed while its links are busy.
        used: the GPU of each rank; empty on a CPU.
        link_in: bytes/s of the slowest link while all are busy.
        alone: bytes/s of each link while the others are idle.
    """
    return [
        *_missing_gpu_warnings(used),
        *(warning for index, gpu in enumerate(used) for warning in _gpu_warnings(index, gpu)),
        *_link_warnings(used, link_in, alone),
        *_host_warnings(machine, used),
    ]


def all_reduce_warnings(used: list[Gpu], link_in: float, all_reduce_rate: float) -> list[str]:
    """Return a warning if large all-reduces are far slower than a link.

    Rates are in bytes/s. There is no warning if the advised setting is already in use.
    """
    slow = len(used) > 1 and all_reduce_rate < _SLOW_ALL_REDUCE * link_in
    if not slow or COPY_ENGINES in os.environ:
        return []
    return [
        f"large all-reduces run at {all_reduce_rate / 1e9:.1f} GB/s and a link at "
        f"{link_in / 1e9:.1f} GB/s, so all-reduces bound a long prefill. If NCCL makes them "
        f"in host memory, {COPY_ENGINES}=1 may make large ones several times faster and small ones "
        "slower: probe again with it, and compare the output of `tierforce plan` for both files."
    ]


def _missing_gpu_warnings(used: list[Gpu]) -> Iterator[str]:
    if not used:
        yield "no GPU is used: device memory is host memory, and the link is a copy within it."


def _gpu_warnings(index: int, gpu: Gpu) -> Iterator[str]:
    """Yield warnings about one GPU's PCIe slot, NUMA node and IOMMU."""
    label = f"GPU {index} ({gpu.name})"
    if not gpu.memory:
        yield (f"NVML reports no GPU {index} at {gpu.address}: its PCIe slot was not checked.")
    if 0 < gpu.pcie_width < 16:
        yield (
            f"{label} uses {gpu.pcie_width} PCIe lanes of at most {gpu.max_pcie_width}: with 16 "
            f"lanes a verification would take {gpu.pcie_width / 16:.2f} of the time. Use an x16 "
            "slot that is connected to the CPU."
        )
    if 0 < gpu.pcie_generation < gpu.max_pcie_generation:
        yield (
            f"{label} runs at PCIe {gpu.pcie_generation}.0 under load and supports "
            f"{gpu.max_pcie_generation}.0: check the riser, and the slot's speed in the BIOS."
        )
    elif 0 < gpu.max_pcie_generation < 4:
        yield f"{label} supports only PCIe {gpu.max_pcie_generation}.0: half of PCIe 4.0 or less."
    if not gpu.nearby:
        yield (
            f"{label} is on NUMA node {gpu.numa_node}, where this process may not run: its host "
            "memory will be on another socket. Start the process on that node (numactl), or allow "
            "it all CPUs."
        )
    if gpu.iommu not in (None, "identity"):
        yield (
            f"copies of {label} are translated by an IOMMU ({gpu.iommu}), which costs bandwidth "
            "and may limit pinned memory: boot with iommu=pt."
        )


def _link_warnings(used: list[Gpu], link_in: float, alone: list[float]) -> Iterator[str]:
    """Yield warnings about differences and contention between the GPUs' links."""
    if len(used) < 2:
        return
    slowest, fastest = min(alone), max(alone)
    if slowest < _SHARED_LANES * fastest:
        yield (
            f"GPU {alone.index(slowest)}'s link reaches {slowest / 1e9:.1f} GB/s alone, another "
            f"{fastest / 1e9:.1f} GB/s, and all ranks wait for the slowest: use a slot with as "
            "many lanes that is connected to the CPU."
        )
    if link_in < _SHARED_LANES * slowest:
        yield (
            f"the links reach {link_in / 1e9:.1f} GB/s each when all are busy, and "
            f"{slowest / 1e9:.1f} GB/s alone: they share lanes (a chipset or a switch). Use slots "
            "that are connected to the CPU."
        )
    if len({gpu.numa_node for gpu in used if gpu.numa_node is not None}) > 1:
        yield (
            "the GPUs are on different NUMA nodes: all-reduces cross the link between the sockets."
        )


def _host_warnings(machine: Machine, used: list[Gpu]) -> Iterator[str]:
    """Yield warnings about host memory."""
    if used and machine.wsl:
        yield (
            "this is WSL2, which pins only part of the host's memory: use native Linux for longer "
            "documents."
        )
    required = min(_BOOK_BYTES, machine.host_available)
    if used and machine.memlock is not None and machine.memlock < required:
        yield (
            f"only {machine.memlock / 1e9:.1f} GB may be locked, and some drivers enforce this "
            "limit: raise it (ulimit -l)."
        )
    if machine.host_available < _BOOK_BYTES:
        yield (
            f"{machine.host_available / 1e9:.0f} GB of host memory are available, and 130,048 "
            f"tokens of a 7B model without GQA need {_BOOK_BYTES / 1e9:.0f} GB. Plan for shorter "
            "documents, or for models with GQA."
        )
