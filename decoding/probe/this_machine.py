"""The profile of this machine as it is now, for a plan that names no hardware.

Memory and PCIe lanes are those of the machine; nothing is run on a GPU, so rates are those of its
GPUs' shipped profile, or assumed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from decoding.planning.hardware_profile import HardwareProfile, Trust
from decoding.probe.survey import Gpu, Machine
from offload.errors import TierForceError

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_UUID_PREFIX = len("GPU-") + 8  # characters that identify a GPU of a machine
_DIVIDED = (
    "plans are for whole GPUs, and one of this machine's is divided into instances (MIG): name "
    "others in CUDA_VISIBLE_DEVICES, or give --hardware a file that `tierforce probe` wrote."
)
_CONTEXT_BYTES = 500e6  # assumed: what CUDA takes of a GPU for a process
_IN_USE_BYTES = 1e9  # usage of a GPU by other processes from which there is a note
# GB/s of a lane by PCIe generation, of which 80% are assumed achievable, as in the profiles
_LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_ACHIEVABLE = 0.8
_FEWER_LANES = 0.9  # share of the profile's link rate below which the slot is taken as narrower
_ASSUMED_CORES = 2  # cores of the machine whose rates are assumed for a CPU
_MEASURE = "`tierforce probe --gpus {gpus}` measures them, for --hardware"


@dataclass(frozen=True)
class PlannedMachine:
    """The profile of a machine, what it may decide, and what the user should know about it."""

    profile: HardwareProfile
    trust: Trust  # as an engine's on this machine
    notes: Sequence[str] = ()
    environment: str = ""  # variable that chooses its GPUs, if they are not the first ones


def this_machine(gpus: int | None) -> list[PlannedMachine]:
    """Return the machine that this process runs on, with each number of GPUs that is worth a plan.

    Args:
        gpus: ranks to use; None: one of `gpu_counts`, all of which are returned.

    Raises TierForceError for more GPUs than there are, and for parts of GPUs (MIG).
    """
    machine = Machine.detect()
    setting = os.environ.get(_VISIBLE)
    visible = visible_gpus(machine.gpus, setting)
    notes = []
    if setting is not None and machine.gpus and not visible:
        hidden = len(machine.gpus)
        notes.append(f"{_VISIBLE}={shlex.quote(setting)} hides the machine's GPUs ({hidden}).")
    if machine.has_problem:
        notes.append(f"NVIDIA's driver has a problem ({machine.driver}).")
    if not visible:
        return [_without_gpu(machine, gpus or 1, notes)]
    if any(gpu.is_divided for gpu in visible):
        raise TierForceError(_DIVIDED)
    largest = max(visible, key=lambda gpu: gpu.memory)
    same = [gpu for gpu in visible if gpu.name == largest.name]
    if gpus is not None and gpus > len(same):
        raise TierForceError(
            f"--gpus {gpus}, but this machine has {len(same)} x {largest.name}: plan for others "
            "with --hardware."
        )
    notes += _order_notes(machine, setting)
    notes += _usage_notes(same)
    # those in use by others come last
    free_first = sorted(same, key=lambda gpu: -gpu.free if _is_in_use(gpu) else float("-inf"))
    counts = [gpus] if gpus is not None else gpu_counts(len(same))
    return [
        _with_gpus(machine, visible, [gpu for gpu in same if gpu in free_first[:count]], notes)
        for count in counts
    ]


def gpu_counts(gpus: int) -> list[int]:
    """Return the numbers of GPUs to choose between: all of them, and smaller powers of two."""
    return [*(1 << power for power in range((gpus - 1).bit_length())), gpus]


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    As in CUDA, those after an entry that refers to none are left out, and all are if one is
    repeated. The first entry decides whether they are indices or beginnings of UUIDs. Raises
    TierForceError for an instance of a divided GPU.
    """
    if setting is None:
        return list(gpus)
    entries = [entry.strip() for entry in setting.split(",")]
    visible: list[Gpu] = []
    for entry in entries:
        if gpus and entry.startswith("MIG-"):
            raise TierForceError(_DIVIDED)
        if entries[0].startswith("GPU-"):
            found = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        else:
            found = list(gpus[int(entry) :][:1]) if re.fullmatch(r"\+?[0-9]{1,9}", entry) else []
        if len(found) != 1:
            break
        if any(found[0] is gpu for gpu in visible):
            return []
        visible += found
    return visible


def _order_notes(machine: Machine, setting: str | None) -> Iterator[str]:
    """Yield a note if CUDA may count GPUs of several kinds in another order than the driver."""
    is_by_index = setting is not None and "GPU-" not in setting
    has_kinds = len({gpu.name for gpu in machine.gpus}) > 1
    if has_kinds and is_by_index and os.environ.get(_ORDER) != "PCI_BUS_ID":
        yield (
            f"{_VISIBLE} may count GPUs of several kinds in another order than the plan: "
            f"{_ORDER}=PCI_BUS_ID sets that of nvidia-smi."
        )


def _with_gpus(
    machine: Machine, visible: Sequence[Gpu], used: Sequence[Gpu], notes: Sequence[str]
) -> PlannedMachine:
    """Return the machine with some of its visible GPUs, which are of one kind."""
    count, name, environment = len(used), used[0].name, ""
    has_kinds = len({gpu.name for gpu in visible}) > 1
    if has_kinds or list(visible[:count]) != list(used):
        uuids = ",".join(gpu.uuid[:_UUID_PREFIX] for gpu in used)
        environment = f"{_VISIBLE}={uuids}"
    profile, trust = HardwareProfile.find(None, name, count)
    is_assumed = trust is Trust.NONE
    notes = [
        *notes,
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
        profile = _with_link(profile, rate)
    free = min(gpu.free for gpu in used)
    words = f"{count} x {name}"
    if any(map(_is_in_use, used)):
        words += f", {'at least ' if count > 1 else ''}{free / 1e9:.1f} GB free"
    profile = replace(
        profile,
        name=f"this machine ({words})",
        device_memory=max(1.0, free - _CONTEXT_BYTES),
        host_memory=max(1.0, machine.host_available),
    )
    return PlannedMachine(profile, trust, notes, environment)


def _with_link(profile: HardwareProfile, rate: float) -> HardwareProfile:
    """Return the profile with this rate of each link, and of all-reduces that go over the links."""
    shared = profile.shared_all_reduce_rate
    if shared is not None:
        shared = min(shared, rate / 2 / (profile.gpus - 1))  # as in the built-in profiles
    return replace(profile, link_in=rate, link_out=rate, shared_all_reduce_rate=shared)


def _is_in_use(gpu: Gpu) -> bool:
    return gpu.memory - gpu.free > _IN_USE_BYTES


def _usage_notes(used: Sequence[Gpu]) -> Iterator[str]:
    """Yield notes on GPUs that are in use."""
    for gpu in filter(_is_in_use, used):
        yield (
            f"GPU {gpu.address}: {(gpu.memory - gpu.free) / 1e9:.1f} of {gpu.memory / 1e9:.1f} GB "
            "are in use, perhaps by other programs; plans are for the rest."
        )


def _link_rate(gpu: Gpu) -> float:
    """Return the bytes/s that a GPU's slot is assumed to reach; infinite if it is unknown."""
    rate = _LANE_RATES.get(gpu.max_pcie_generation, 0.0) * gpu.max_pcie_width
    return _ACHIEVABLE * rate * 1e9 or float("inf")


def _without_gpu(machine: Machine, ranks: int, notes: Sequence[str]) -> PlannedMachine:
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
        *notes,
        f"rates are assumed for {words}: {_MEASURE.format(gpus=ranks)}. For another machine, name "
        "its GPUs: --hardware 2x4090.",
    ]
    return PlannedMachine(profile, trust, notes)
