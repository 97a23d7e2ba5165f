"""What a text would take on a machine that is only described: what `tierforce plan` says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decoding.planning.budget import BudgetChoice, BudgetChooser
from decoding.planning.cost import Acceptance, CostSource, PredictedCosts
from decoding.planning.fit import affordable, longest_prompt, memory_of
from decoding.planning.forecast import Forecast, forecast
from decoding.planning.needs import TextNeeds
from decoding.planning.profile import HardwareProfile
from decoding.settings import LEVELS
from offload.errors import FitError
from offload.memory_plan import MemoryPlan, device_tiers
from offload.slice_format import slice_format

Tiers = dict[str, int]  # bytes of one rank's device memory, by what they are for


@dataclass(frozen=True)
class Outlook:
    """One text on one machine: where everything goes, and how long it takes."""

    needs: TextNeeds  # with the budget that was chosen
    hardware: HardwareProfile
    prompt: int
    new: int
    choice: BudgetChoice
    plan: MemoryPlan
    prefill_tiers: Tiers
    decode_tiers: Tiers
    acceptance: Acceptance
    forecast: Forecast

    @property
    def layers_on_host(self) -> int:
        """Return how many layers have their KV on the host while the text is decoded."""
        return self.needs.target.layers - self.plan.resident_layers


def look_ahead(
    needs: TextNeeds,
    hardware: HardwareProfile,
    prompt: int,
    new: int,
    acceptance: Acceptance | None = None,
    costs: CostSource | None = None,
) -> Outlook:
    """Plan a text of `prompt` + `new` tokens, with the budget that is predicted to pay.

    `costs` are what budgets are weighed by; by default the machine's own. Raises FitError, which
    says how long a text would fit.
    """
    acceptance = acceptance or Acceptance()
    memory = memory_of(hardware, needs)
    try:
        plans = affordable(needs, memory, prompt, new)
    except FitError as error:
        fits = longest_prompt(needs, memory, prompt, new)
        hint = "No shorter context would fit either."
        if fits:
            hint = f"{fits + new} tokens of context would fit."
        raise FitError(f"{error} {hint}") from error
    chooser = BudgetChooser(costs or PredictedCosts(hardware, acceptance))
    choice = chooser.choose(needs, plans, prompt)
    if needs.chooses_budget:
        needs = needs.with_budget(choice.budget)
    plan = plans[needs.budget]
    prefill, decode = device_tiers(
        needs.memory(prompt, new), plan.resident_layers, plan.late_layers, plan.sliced_layers
    )
    weights = {"weights": needs.weight_bytes}
    return Outlook(
        needs=needs,
        hardware=hardware,
        prompt=prompt,
        new=new,
        choice=choice,
        plan=plan,
        prefill_tiers=weights | prefill,
        decode_tiers=weights | decode,
        acceptance=acceptance,
        forecast=forecast(needs, plan, hardware, prompt, new, acceptance),
    )


def plain(outlook: Outlook) -> Outlook | None:
    """Return the same text in plain decoding, which has all the memory to itself.

    None where that does not fit, though it takes less of nearly everything.
    """
    needs = replace(outlook.needs, mode="plain")
    try:
        return look_ahead(needs, outlook.hardware, outlook.prompt, outlook.new)
    except FitError:
        return None


def in_slices(needs: TextNeeds, outlook: Outlook) -> Outlook | None:
    """Return the text of these needs as a mode with slices would do it, in a plan of its own.

    None where it has them, where it has no layer on the host to save, where its elements are not
    cut, and where that does not fit.
    """
    mode = f"sliced-{needs.mode}"
    if mode not in LEVELS or not outlook.layers_on_host or slice_format(needs.dtype) is None:
        return None
    try:
        return look_ahead(
            replace(needs, mode=mode),
            outlook.hardware,
            outlook.prompt,
            outlook.new,
            outlook.acceptance,
        )
    except FitError:
        return None
