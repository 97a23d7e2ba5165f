"""What a model requires of each GPU of a machine, and between how many it can be divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decoding.config.settings import Settings
from decoding.planning.forward_cost import choose_weights
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.requirements import Requirements, draft_ranks
from offload.dtypes import dtype_spec
from parallel.config.model_config import ModelConfig, predictor_config
from parallel.config.parameter_count import min_kv_heads

if TYPE_CHECKING:
    from decoding.probe.this_machine import PlannedMachine


def requirements_on(
    machine: HardwareProfile, target: ModelConfig, draft: ModelConfig | None, settings: Settings
) -> Requirements:
    """Return the requirements on one rank of a machine, with weights stored as fits it best.

    Raises TierForceError for incompatible models or settings.
    """
    ranks, kind = int(machine.gpus), dtype_spec(settings.dtype)
    memory = machine.device_memory
    target = choose_weights(target, settings.weights, machine, kind, memory)
    small = predictor_config(target) if target.has_predictor else None
    if draft is not None:
        small = choose_weights(draft, settings.weights, machine, kind, memory, target)
    target.kv_layout(ranks, kind)  # raises if the heads cannot be split over ranks
    settings.check_layers(target.full_layers)
    return Requirements(
        target=target,
        draft=small,
        mode=settings.resolved_mode(small is not None, target.full_layers),
        settings=settings,
        dtype=kind,
        ranks=ranks,
        draft_ranks=draft_ranks(small, ranks, kind) if small is not None else 1,
        copies=machine.runs_ahead,  # on a CPU, the device is the host
        multiprocessors=machine.multiprocessors,
    )


def divisible(machines: Sequence[PlannedMachine], target: ModelConfig) -> Sequence[PlannedMachine]:
    """Return those between whose GPUs a model can be divided; of one number, that."""
    heads = min_kv_heads(target)
    return [each for each in machines if each.profile.gpus <= heads] or machines[:1]
