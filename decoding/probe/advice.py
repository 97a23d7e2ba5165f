"""What of a machine will cost its user most."""

from __future__ import annotations

from decoding.probe.survey import Gpu, Machine

_BOOK = 68e9  # bytes of KV of 130,048 tokens of a 7B model


def warnings(machine: Machine, used: list[Gpu], link_in: float, alone: list[float]) -> list[str]:
    """What costs users most, each with what was found and what to do.

    `machine` as it is while its links are busy; `used`: of its GPUs those of the ranks, by rank,
    none on a CPU. Rates in bytes a second: of the slowest link while all are busy, and of each
    `alone`.
    """
    found = []
    if not used:
        found.append(
            "no GPU is used: device memory is host memory, and links are copies within it."
        )
    for index, gpu in enumerate(used):
        if not gpu.memory:
            found.append(
                f"NVML knows of no GPU {index} at {gpu.address}: its slot and its lanes could not "
                "be looked at."
            )
        if 0 < gpu.pcie_width < 16:
            found.append(
                f"GPU {index} ({gpu.name}) runs on {gpu.pcie_width} PCIe lanes, "
                f"{gpu.pcie_width_most} at most: with 16 a verification would take "
                f"{gpu.pcie_width / 16:.2f} of the time. Use a slot with 16 lanes that hangs on "
                "the CPU."
            )
        if 0 < gpu.pcie_generation < gpu.pcie_generation_most:
            found.append(
                f"GPU {index} ({gpu.name}) runs on PCIe {gpu.pcie_generation} under load, and could"
                f" on {gpu.pcie_generation_most}: look for a riser that is too slow, or the slot's "
                "speed in the BIOS."
            )
        elif 0 < gpu.pcie_generation_most < 4:
            found.append(
                f"GPU {index} ({gpu.name}) has PCIe {gpu.pcie_generation_most} at most: half of "
                "PCIe 4 or less."
            )
        if not gpu.near:
            found.append(
                f"GPU {index} ({gpu.name}) hangs on NUMA node {gpu.numa_node}, where this process "
                "may not run: its host memory will lie across the link between the sockets. Start "
                "it there (numactl), or let it use all CPUs."
            )
        if gpu.iommu not in (None, "identity"):
            found.append(
                f"copies of GPU {index} ({gpu.name}) are translated by an IOMMU ({gpu.iommu}), "
                "which costs bandwidth and may limit what can be pinned: boot with iommu=pt."
            )
    if len(used) > 1 and min(alone) < 0.8 * max(alone):
        slow = alone.index(min(alone))
        found.append(
            f"GPU {slow} gets {min(alone) / 1e9:.1f} GB/s alone, another {max(alone) / 1e9:.1f}, "
            "and all wait for the slowest: use a slot with as many lanes that hangs on the CPU."
        )
    if len(used) > 1 and link_in < 0.8 * min(alone):
        found.append(
            f"all at once the GPUs get {link_in / 1e9:.1f} GB/s each, one alone "
            f"{min(alone) / 1e9:.1f}: they share lanes (a chipset, or a switch). Use slots that "
            "hang on the CPU."
        )
    if len({gpu.numa_node for gpu in used if gpu.numa_node is not None}) > 1:
        found.append(
            "the GPUs hang on different NUMA nodes: sums over ranks cross the link between the "
            "sockets."
        )
    if used and machine.wsl:
        found.append(
            "this is WSL2, which pins only part of the host's memory: use Linux itself for texts "
            "that exceed it."
        )
    if (
        used
        and machine.memlock is not None
        and machine.memlock < min(_BOOK, machine.host_available)
    ):
        found.append(
            f"only {machine.memlock / 1e9:.1f} GB may be locked, and some drivers heed that: raise "
            "it (ulimit -l)."
        )
    if machine.host_available < _BOOK:
        found.append(
            f"{machine.host_available / 1e9:.0f} GB of host memory are available; 130,048 tokens of"
            f" a 7B model without grouped heads take {_BOOK / 1e9:.0f} GB. Plan for shorter texts, "
            "or for models with grouped heads."
        )
    return found
