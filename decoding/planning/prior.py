"""The hardware prior: strategy selection before any request has been measured."""

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
    """A hardware profile and whether it was measured on this machine."""

    machine: HardwareProfile
    is_measured: bool  # with `tierforce probe`; otherwise a shipped profile of the same GPU

    def costs(self, is_coupled: bool, concurrency: int = 1) -> PredictedCosts:
        """Return the round costs predicted from this profile.

        Args:
            is_coupled: as in `Acceptance`.
            concurrency: requests in a batch.
        """
        return PredictedCosts(self.machine, Acceptance(is_coupled=is_coupled), concurrency)

    def trusted(
        self, plans: Mapping[Strategy, MemoryPlan], mode: str
    ) -> Mapping[Strategy, MemoryPlan]:
        """Return the plans among which this profile may choose.

        Split modes require measured rates of reconstruction and of attention to high bytes, unless
        `mode`, which is not split, does not fit.
        """
        rates = self.machine.reconstruct_rate, self.machine.high_bits_rate
        if self.is_measured and None not in rates:
            return plans
        unsplit = {strategy: plan for strategy, plan in plans.items() if strategy.mode == mode}
        return unsplit or plans

    def with_link(self, rate: float | None) -> HardwarePrior:
        """Return this prior with a link rate measured by the engine; None leaves it unchanged."""
        return self if rate is None else replace(self, machine=replace(self.machine, link_in=rate))


def find_prior(hardware: str | None, gpu: str, ranks: int) -> HardwarePrior | None:
    """Return the hardware prior of this machine; None if it is unknown.

    Args:
        hardware: a file of `tierforce probe` or a shipped profile's name; None: by GPU name.
        gpu: the driver's name of a rank's device; empty on a CPU.
        ranks: of this run, one per GPU.

    Raises TierForceError for an unreadable file, or one for another number of GPUs.
    """
    if hardware is None:
        shipped = HardwareProfile.of_gpus(gpu, ranks)
        return None if shipped is None else HardwarePrior(shipped, is_measured=False)
    machine = HardwareProfile.from_name(hardware)
    if machine.gpus != ranks:
        raise TierForceError(
            f"`hardware` {hardware} is for {machine.gpus} GPUs, and this run has {ranks}: measure "
            f"with `tierforce probe --gpus {ranks}`, or leave it out."
        )
    return HardwarePrior(machine, is_measured=not HardwareProfile.is_shipped(hardware))
