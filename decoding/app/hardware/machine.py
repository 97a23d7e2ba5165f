"""The machine that a plan is for: this one, or one that the options describe."""

# No `from __future__ import annotations`: typer reads these annotations as objects.
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from decoding.planning.hardware_profile import HardwareProfile, shipped_gpus
from offload.errors import TierForceError

if TYPE_CHECKING:
    from decoding.probe.this_machine import PlannedMachine

_MAX_GB = 1_000_000

MACHINE = (
    "Machine to plan for: a number of GPUs and one of 4090, 3090, 5090, 4070-Ti-Super, L40S, "
    "6000-Ada, A100-80 and H200, such as 2x4090, or a JSON file written by probe. Default: this "
    "machine, with the memory that is free now."
)
Hardware = Annotated[str | None, typer.Option(help=MACHINE, metavar="MACHINE")]
PlannedGpus = Annotated[
    int | None,
    typer.Option(
        help="GPUs of the machine to plan for, or ranks on a CPU. Default: as many of this "
        "machine's as are predicted to be fastest; 1 on a CPU.",
        min=1,
        max=64,
    ),
]
HostMemory = Annotated[
    float | None,
    typer.Option(help="Host memory in GB that is available for KV; on a CPU for everything."),
]


def find_machines(
    hardware: str | None,
    gpus: int | None,
    host_memory: float | None,
    any_number: bool = False,
) -> list["PlannedMachine"]:
    """Return a machine by the options, with each number of GPUs to choose between.

    Raises TierForceError for options that describe none.

    Args:
        hardware: None for this machine.
        gpus: of this machine; None: some.
        host_memory: in GB; None: the machine's.
        any_number: whether fewer GPUs than `hardware` names may be chosen.
    """
    from decoding.probe.this_machine import this_machine  # imports the driver's library

    if host_memory is not None and not 0 <= host_memory <= _MAX_GB:
        raise TierForceError(
            f"--host-memory must be between 0 and {_MAX_GB:,} GB, found {host_memory}."
        )
    if hardware is None:
        machines = this_machine(gpus)
    else:
        machines = _named_machines(hardware, gpus, any_number)
    if host_memory is None:
        return machines
    nbytes = max(1.0, host_memory * 1e9)
    return [replace(each, profile=_with_host_memory(each.profile, nbytes)) for each in machines]


def _named_machines(name: str, gpus: int | None, any_number: bool) -> list["PlannedMachine"]:
    """Return the machine that `--hardware` names."""
    from decoding.probe.this_machine import PlannedMachine, gpu_counts

    profiles = [HardwareProfile.from_name(name)]
    count = int(profiles[0].gpus)
    if gpus is not None and gpus > count:
        raise TierForceError(f"--gpus {gpus}, but --hardware {name} has {count} GPUs.")
    if (found := shipped_gpus(name)) is not None and (gpus is not None or any_number):
        counts = gpu_counts(count) if gpus is None else [gpus]
        profiles = [HardwareProfile.from_name(f"{each}x{found[1]}") for each in counts]
    elif gpus not in (None, count):
        raise TierForceError(f"--hardware {name} was measured with {count} GPUs: leave out --gpus.")
    return [PlannedMachine(each, each.trust_in(name)) for each in profiles]


def _with_host_memory(profile: HardwareProfile, nbytes: float) -> HardwareProfile:
    """Return a profile with this host memory, which is a CPU's only memory."""
    if profile.runs_ahead:
        return replace(profile, host_memory=nbytes)
    return replace(profile, host_memory=nbytes, device_memory=max(1.0, nbytes / profile.gpus))
