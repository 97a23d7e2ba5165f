"""The profile of this machine as it is now, for a plan that names no hardware.

Memory and PCIe lanes are those of the machine; nothing is run on a GPU, so rates are those of its
GPUs' shipped profile, or assumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from decoding.planning.hardware_profile import HardwareProfile, Trust
from decoding.probe.survey import Gpu, Machine
from offload.errors import TierForceError

_CONTEXT_BYTES = 500e6  # assumed: what CUDA takes of a GPU for a process
_IN_USE_BYTES = 1e9  # usage of a GPU by other processes from which there is a note
# GB/s of a lane by PCIe generation, of which 80% are assumed achievable, as in the profiles
_LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_ACHIEVABLE = 0.8
_FEWER_LANES = 0.9  # share of the profile's link rate below which the slot is taken as narrower
_ASSUMED_CORES = 2  # cores of the machine whose rates are assumed for a CPU
_MEASURE = "`tierforce probe --gpus {gpus}` measures them, for --hardware"


@dataclass(frozen=True)
class ThisMachine:
    """The profile of a machine, what it may decide, and what the user should know about it."""

    profile: HardwareProfile
    trust: Trust  # as an engine's on this machine
    notes: Sequence[str] = ()

    @classmethod
    def detect(cls, gpus: int | None, max_gpus: int) -> ThisMachine:
        """Return the machine that this process runs on.

        Args:
            gpus: ranks to use; None: all GPUs of the kind with the most memory.
            max_gpus: GPUs between which the model can be divided.

        Raises TierForceError for more GPUs than there are.
        """
        machine = Machine.detect()
        visible = visible_gpus(machine.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if visible:
            return _with_gpus(machine, visible, gpus, max_gpus)
        return _without_gpu(machine, gpus or 1)


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Those after an index that does not exist are left out, as in CUDA. An entry that is a UUID
    counts as any GPU: machines with different ones are rare.
    """
    if setting is None:
        return list(gpus)
    visible: list[Gpu] = []
    for position, entry in enumerate(filter(None, map(str.strip, setting.split(",")))):
        index = position if entry.startswith(("GPU-", "MIG-")) else -1
        if entry.isdecimal():
            index = int(entry)
        if not 0 <= index < len(gpus):
            break
        visible.append(gpus[index])
    return visible


def _with_gpus(
    machine: Machine, visible: Sequence[Gpu], gpus: int | None, max_gpus: int
) -> ThisMachine:
    largest = max(visible, key=lambda gpu: gpu.memory)
    same = [gpu for gpu in visible if gpu.name == largest.name]
    if gpus is not None and gpus > len(same):
        raise TierForceError(
            f"--gpus {gpus}, but this machine has {len(same)} x {largest.name}: plan for others "
            "with --hardware."
        )
    used = same[: gpus or max_gpus]
    count = len(used)
    profile, trust = HardwareProfile.find(None, largest.name, count)
    is_assumed = trust is Trust.NONE
    notes = [
        *_usage_notes(used, len(visible) - count, is_chosen=gpus is not None),
        f"rates are {'assumed to be ' if is_assumed else ''}those of the profile {profile.name}: "
        f"{_MEASURE.format(gpus=count)}.",
    ]
    slowest = min(used, key=_link_rate)
    rate = _link_rate(slowest)
    if rate < float("inf") and (is_assumed or rate < _FEWER_LANES * profile.link_in):
        notes.append(
            f"PCIe {slowest.max_pcie_generation}.0 with {slowest.max_pcie_width} lanes: "
            f"{rate / 1e9:.1f} GB/s to each GPU are assumed."
        )
        profile = replace(profile, link_in=rate, link_out=rate)
    profile = replace(
        profile,
        name=f"this machine ({count} x {largest.name})",
        device_memory=max(1.0, min(gpu.free for gpu in used) - _CONTEXT_BYTES),
        host_memory=max(1.0, machine.host_available),
    )
    return ThisMachine(profile, trust, notes)


def _usage_notes(used: Sequence[Gpu], unused: int, is_chosen: bool) -> Iterator[str]:
    """Yield notes on which GPUs a plan is for, and on those that are in use."""
    if len(used) > 1 and not is_chosen:
        yield f"the plan is for {len(used)} GPUs: run with --gpus {len(used)}."
    if unused:
        yield f"the plan leaves out {unused} of the GPUs."
    for index, gpu in enumerate(used):
        if (in_use := gpu.memory - gpu.free) > _IN_USE_BYTES:
            yield (
                f"GPU {index}: {in_use / 1e9:.1f} of {gpu.memory / 1e9:.1f} GB are in use, perhaps "
                "by other programs; the plan is for the rest."
            )


def _link_rate(gpu: Gpu) -> float:
    """Return the bytes/s that a GPU's slot is assumed to reach; infinite if it is unknown."""
    rate = _LANE_RATES.get(gpu.max_pcie_generation, 0.0) * gpu.max_pcie_width
    return _ACHIEVABLE * rate * 1e9 or float("inf")


def _without_gpu(machine: Machine, ranks: int) -> ThisMachine:
    """Return a machine whose device memory is host memory, which the ranks share.

    Arithmetic is assumed to grow with the cores, and reading memory not to.
    """
    assumed, trust = HardwareProfile.find(None, "", ranks)
    cores = machine.usable_cores
    scale = cores / _ASSUMED_CORES / ranks
    rates = {
        name: value * scale
        for name in ("matmul", "attention", "prefill_attention")
        if (value := getattr(assumed, name)) is not None
    }
    words = f"{cores} core{'s' if cores > 1 else ''}"
    profile = replace(
        assumed,
        name=f"this machine ({words}, no GPU)",
        device_memory=max(1.0, machine.host_available / ranks),
        host_memory=max(1.0, machine.host_available),
        **rates,
    )
    notes = [
        f"rates are assumed for {words}: {_MEASURE.format(gpus=ranks)}. For another machine, name "
        "its GPUs: --hardware 2x4090."
    ]
    return ThisMachine(profile, trust, notes)
