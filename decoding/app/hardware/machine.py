"""The machine that a plan is for: this one, or one that the options describe."""

# No `from __future__ import annotations`: typer reads these annotations as objects.
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from decoding.planning.hardware_profile import HardwareProfile
from offload.errors import TierForceError

if TYPE_CHECKING:
    from decoding.probe.this_machine import ThisMachine

Hardware = Annotated[
    str | None,
    typer.Option(
        help="Machine to plan for: a number of GPUs and one of 4090, 3090, 5090, 4070-Ti-Super, "
        "L40S, 6000-Ada, A100-80 and H200, such as 2x4090, or a JSON file written by probe. "
        "Default: this machine, with the memory that is free now.",
        metavar="MACHINE",
    ),
]
PlannedGpus = Annotated[
    int | None,
    typer.Option(
        help="GPUs of this machine to plan for, or ranks on a CPU. Default: all that the model "
        "can be divided between; 1 on a CPU.",
        min=1,
    ),
]
HostMemory = Annotated[
    float | None, typer.Option(help="Host memory for KV in GB, instead of the machine's.")
]


def find_machine(
    hardware: str | None, gpus: int | None, host_memory: float | None, max_gpus: int
) -> "ThisMachine":
    """Return a machine by the options: this one unless `hardware` is given; `host_memory` in GB.

    Without `gpus`, of its GPUs the plan is for at most `max_gpus`. Raises TierForceError.
    """
    from decoding.probe.this_machine import ThisMachine  # imports the driver's library

    if hardware is None:
        machine = ThisMachine.detect(gpus, max_gpus)
    elif gpus is not None:
        raise TierForceError("--gpus is for this machine: --hardware says how many GPUs there are.")
    else:
        profile = HardwareProfile.from_name(hardware)
        machine = ThisMachine(profile, profile.trust_in(hardware))
    if host_memory is None:
        return machine
    if not 0 <= host_memory < float("inf"):
        raise TierForceError(f"--host-memory must be 0 or more GB, found {host_memory}.")
    return replace(machine, profile=replace(machine.profile, host_memory=host_memory * 1e9))
