"""What a machine's numbers say of the first text, before any text has said something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from decoding.planning.cost import Acceptance, PredictedCosts
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Strategy
from offload.errors import TierForceError


@dataclass(frozen=True)
class HardwarePrior:
    """A machine's numbers, and how far they are trusted."""

    machine: HardwareProfile
    is_measured: bool  # by `tierforce probe`; else they are those of GPUs of this name

    def costs(self, is_coupled: bool, texts: int = 1) -> PredictedCosts:
        """Return what rounds cost by these numbers.

        Args:
            is_coupled: as in `Acceptance`.
            texts: how many share passes.
        """
        return PredictedCosts(self.machine, Acceptance(is_coupled=is_coupled), texts)

    def trusted(
        self, plans: Mapping[Strategy, MemoryPlan], mode: str
    ) -> Mapping[Strategy, MemoryPlan]:
        """Return the ways that these numbers may choose from.

        Joining slices and attending to codes must have been measured, unless `mode`, without
        slices, does not fit.
        """
        rates = self.machine.reconstruct_rate, self.machine.high_bits_rate
        if self.is_measured and None not in rates:
            return plans
        own = {way: plan for way, plan in plans.items() if way.mode == mode}
        return own or plans

    def with_link(self, rate: float | None) -> HardwarePrior:
        """Return the same with this rate of the link, which an engine measures; None leaves it."""
        return self if rate is None else replace(self, machine=replace(self.machine, link_in=rate))


def find_prior(hardware: str | None, gpu: str, ranks: int) -> HardwarePrior | None:
    """Return what is known of this machine; None where nothing is.

    Args:
        hardware: a file of `tierforce probe`, or a shipped profile's name; None: by the GPUs' name.
        gpu: what the driver calls the device of a rank; empty for a processor.
        ranks: of this run, one for each GPU.

    Raises TierForceError for a file that cannot be read, or is of another number of GPUs.
    """
    if hardware is None:
        shipped = HardwareProfile.of_gpus(gpu, ranks)
        return None if shipped is None else HardwarePrior(shipped, is_measured=False)
    machine = HardwareProfile.from_name(hardware)
    if machine.gpus != ranks:
        raise TierForceError(
            f"`hardware` {hardware} is of {machine.gpus} GPUs, and this run has {ranks}: measure "
            f"with `tierforce probe --gpus {ranks}`, or leave it out."
        )
    return HardwarePrior(machine, is_measured=not HardwareProfile.is_shipped(hardware))
