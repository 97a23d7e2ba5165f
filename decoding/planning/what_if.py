"""What a text would take on a machine that is only described: what `tierforce plan` says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decoding.config.settings import LEVELS
from decoding.planning.cost import Acceptance, PredictedCosts
from decoding.planning.fit import concurrency_pays, feasible_plans, max_prompt, memory_of
from decoding.planning.forecast import Forecast, forecast
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan, device_breakdown
from decoding.planning.memory_requirements import Requirements
from decoding.planning.strategy_selector import StrategyChoice, StrategySelector
from offload.codec.format import split_format
from offload.errors import InsufficientMemoryError

Tiers = dict[str, int]  # bytes of one rank's device memory, by what they are for


@dataclass(frozen=True)
class PlanReport:
    """One text on one machine: where everything goes, and how long it takes."""

    needs: Requirements  # with the mode and the budget that were chosen
    hardware: HardwareProfile
    prompt: int
    new: int
    choice: StrategyChoice
    plan: MemoryPlan
    prefill_memory: Tiers
    decode_memory: Tiers
    acceptance: Acceptance
    forecast: Forecast

    @property
    def layers_on_host(self) -> int:
        """Return how many layers have their KV on the host while the text is decoded."""
        return self.needs.target.layers - self.plan.resident_layers


def plan_request(
    needs: Requirements,
    hardware: HardwareProfile,
    prompt: int,
    new: int,
    acceptance: Acceptance | None = None,
    chooser: StrategySelector | None = None,
    concurrency: int = 1,
) -> PlanReport:
    """Plan a text of `prompt` + `new` tokens, with the mode and budget that are predicted to pay.

    It is one of `concurrency`, which share the memory and the passes. `selector` chooses mode and
    budget, by default by the machine's own numbers. Raises InsufficientMemoryError, which says how long a text
    would fit.
    """
    acceptance = acceptance or Acceptance()
    memory = memory_of(hardware, needs).divided(concurrency)
    try:
        plans = feasible_plans(needs, memory, prompt, new)
    except InsufficientMemoryError as error:
        fits = max_prompt(needs, memory, prompt, new)
        hint = "No shorter context would fit either."
        if fits:
            hint = f"{fits + new} tokens of context would fit."
        raise InsufficientMemoryError(f"{error} {hint}") from error
    if chooser is None:
        chooser = StrategySelector(PredictedCosts(hardware, acceptance, concurrency))
    choice = chooser.select(needs, plans, prompt)
    if needs.has_choice:
        needs = needs.with_strategy(choice.strategy)
    plan = plans[choice.strategy]
    prefill, decode = device_breakdown(
        needs.memory(prompt, new), plan.resident_layers, plan.deferred_layers, plan.split_layers
    )
    weights = {"weights": needs.weight_bytes}
    return PlanReport(
        needs=needs,
        hardware=hardware,
        prompt=prompt,
        new=new,
        choice=choice,
        plan=plan,
        prefill_memory=weights | prefill,
        decode_memory=weights | decode,
        acceptance=acceptance,
        forecast=forecast(needs, plan, hardware, prompt, new, acceptance, concurrency),
    )


def plan_concurrent(needs: Requirements, outlook: PlanReport, most: int) -> PlanReport:
    """Return the text of these needs as one of several: as many as cost each other nothing.

    These are `most` at most, and each keeps on the device what it keeps alone. It is the outlook
    given where shared passes do not pay.
    """
    found = outlook
    # on a GPU short passes are recorded
    pays = concurrency_pays(outlook.needs, records=outlook.hardware.runs_ahead)
    for texts in range(2, most + 1 if pays else 2):
        try:
            shared = plan_request(
                needs,
                outlook.hardware,
                outlook.prompt,
                outlook.new,
                outlook.acceptance,
                concurrency=texts,
            )
        except InsufficientMemoryError:
            break
        if shared.plan != outlook.plan:
            break
        found = shared
    return found


def plan_plain(outlook: PlanReport) -> PlanReport | None:
    """Return the same text in plain decoding, which has all the memory to itself.

    None where that does not fit, though it takes less of nearly everything.
    """
    needs = replace(outlook.needs, mode="plain")
    try:
        return plan_request(needs, outlook.hardware, outlook.prompt, outlook.new)
    except InsufficientMemoryError:
        return None


def plan_alternative(needs: Requirements, outlook: PlanReport) -> PlanReport | None:
    """Return the text of these needs in the same mode with slices, or without where it has them.

    It has a plan of its own. None where a mode with slices was asked for, where there is no layer
    on the host to save, where elements are not cut, and where that does not fit.
    """
    mode = needs.mode if outlook.needs.has_split else f"split-{needs.mode}"
    slicing = outlook.layers_on_host and split_format(needs.dtype) is not None
    if mode == outlook.needs.mode or mode not in LEVELS or not slicing:
        return None
    try:
        return plan_request(
            replace(needs, mode=mode, settings=replace(needs.settings, mode=mode)),
            outlook.hardware,
            outlook.prompt,
            outlook.new,
            outlook.acceptance,
        )
    except InsufficientMemoryError:
        return None
