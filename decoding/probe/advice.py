"""Warnings of what in a machine will cost its user most, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from decoding.probe.survey import Gpu, Machine

_BOOK_BYTES = 68e9  # KV of 130,048 tokens of a 7B model
_SLOW_SUMS = 0.25  # sums at less than this share of a link's rate are said to be slow
COPY_ENGINES = "NCCL_SHM_USE_CUDA_MEMCPY"  # NCCL's setting
_SHARED_LANES = 0.8  # a link at less than this share of another's rate is said to be slow


def warnings(machine: Machine, used: list[Gpu], link_in: float, alone: list[float]) -> list[str]:
    """Return what costs users most, each with what was found and what to do.

    `machine` is as it is while its links are busy; `used` are its GPUs of the ranks, by rank, none
    on a CPU. Rates are in bytes a second: `link_in` of the slowest link while all are busy, `alone`
    of each while the others wait.
    """
    return [
        *_of_no_gpu(used),
        *(warning for index, gpu in enumerate(used) for warning in _of_gpu(index, gpu)),
        *_of_links(used, link_in, alone),
        *_of_host(machine, used),
    ]


def warning_of_sums(used: list[Gpu], link_in: float, sum_rate: float) -> list[str]:
    """Return a warning where large sums over GPUs are far slower than a link; else nothing.

    Rates are in bytes a second. It is no use to whoever has set what it advises.
    """
    slow = len(used) > 1 and sum_rate < _SLOW_SUMS * link_in
    if not slow or COPY_ENGINES in os.environ:
        return []
    return [
        f"large sums over the GPUs run at {sum_rate / 1e9:.1f} GB/s and a link at "
        f"{link_in / 1e9:.1f}: a long prompt waits for sums. Where they go through host memory, "
        f"{COPY_ENGINES}=1 may make large ones several times as fast, and small ones slower: probe "
        "with it, too, and compare what `tierforce plan` says of both files."
    ]


def _of_no_gpu(used: list[Gpu]) -> Iterator[str]:
    if not used:
        yield "no GPU is used: device memory is host memory, and links are copies within it."


def _of_gpu(index: int, gpu: Gpu) -> Iterator[str]:
    """Yield what is wrong with one GPU's slot and its place in the machine."""
    who = f"GPU {index} ({gpu.name})"
    if not gpu.memory:
        yield (
            f"NVML knows of no GPU {index} at {gpu.address}: its slot and its lanes could not be "
            "looked at."
        )
    if 0 < gpu.pcie_width < 16:
        yield (
            f"{who} runs on {gpu.pcie_width} PCIe lanes, {gpu.max_pcie_width} at most: with 16 a "
            f"verification would take {gpu.pcie_width / 16:.2f} of the time. Use a slot with 16 "
            "lanes that hangs on the CPU."
        )
    if 0 < gpu.pcie_generation < gpu.max_pcie_generation:
        yield (
            f"{who} runs on PCIe {gpu.pcie_generation} under load, and could on "
            f"{gpu.max_pcie_generation}: look for a riser that is too slow, or the slot's speed in "
            "the BIOS."
        )
    elif 0 < gpu.max_pcie_generation < 4:
        yield f"{who} has PCIe {gpu.max_pcie_generation} at most: half of PCIe 4 or less."
    if not gpu.nearby:
        yield (
            f"{who} hangs on NUMA node {gpu.numa_node}, where this process may not run: its host "
            "memory will lie across the link between the sockets. Start it there (numactl), or let "
            "it use all CPUs."
        )
    if gpu.iommu not in (None, "identity"):
        yield (
            f"copies of {who} are translated by an IOMMU ({gpu.iommu}), which costs bandwidth and "
            "may limit what can be pinned: boot with iommu=pt."
        )


def _of_links(used: list[Gpu], link_in: float, alone: list[float]) -> Iterator[str]:
    """Yield what is wrong with the GPUs' links beside each other."""
    if len(used) < 2:
        return
    slowest, fastest = min(alone), max(alone)
    if slowest < _SHARED_LANES * fastest:
        yield (
            f"GPU {alone.index(slowest)} gets {slowest / 1e9:.1f} GB/s alone, another "
            f"{fastest / 1e9:.1f}, and all wait for the slowest: use a slot with as many lanes "
            "that hangs on the CPU."
        )
    if link_in < _SHARED_LANES * slowest:
        yield (
            f"all at once the GPUs get {link_in / 1e9:.1f} GB/s each, one alone "
            f"{slowest / 1e9:.1f}: they share lanes (a chipset, or a switch). Use slots that hang "
            "on the CPU."
        )
    if len({gpu.numa_node for gpu in used if gpu.numa_node is not None}) > 1:
        yield (
            "the GPUs hang on different NUMA nodes: sums over ranks cross the link between the "
            "sockets."
        )


def _of_host(machine: Machine, used: list[Gpu]) -> Iterator[str]:
    """Yield what is wrong with the host's memory."""
    if used and machine.wsl:
        yield (
            "this is WSL2, which pins only part of the host's memory: use Linux itself for texts "
            "that exceed it."
        )
    wanted = min(_BOOK_BYTES, machine.host_available)
    if used and machine.memlock is not None and machine.memlock < wanted:
        yield (
            f"only {machine.memlock / 1e9:.1f} GB may be locked, and some drivers heed that: raise "
            "it (ulimit -l)."
        )
    if machine.host_available < _BOOK_BYTES:
        yield (
            f"{machine.host_available / 1e9:.0f} GB of host memory are available; 130,048 tokens of"
            f" a 7B model without grouped heads take {_BOOK_BYTES / 1e9:.0f} GB. Plan for shorter "
            "texts, or for models with grouped heads."
        )
