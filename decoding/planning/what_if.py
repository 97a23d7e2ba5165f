"""What a text would take on a machine that is only described: what `tierforce plan` says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decoding.config.settings import LEVELS
from decoding.planning.cost import Acceptance, PredictedCosts
from decoding.planning.fit import affordable, longest_prompt, memory_of, sharing_pays
from decoding.planning.forecast import Forecast, forecast
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan, device_tiers
from decoding.planning.memory_requirements import TextNeeds
from decoding.planning.strategy_selector import WayChoice, WayChooser
from offload.codec.format import slice_format
from offload.errors import FitError

Tiers = dict[str, int]  # bytes of one rank's device memory, by what they are for


@dataclass(frozen=True)
class Outlook:
    """One text on one machine: where everything goes, and how long it takes."""

    needs: TextNeeds  # with the mode and the budget that were chosen
    hardware: HardwareProfile
    prompt: int
    new: int
    choice: WayChoice
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
    chooser: WayChooser | None = None,
    at_once: int = 1,
) -> Outlook:
    """Plan a text of `prompt` + `new` tokens, with the mode and budget that are predicted to pay.

    It is one of `at_once`, which share the memory and the passes. `chooser` chooses mode and
    budget, by default by the machine's own numbers. Raises FitError, which says how long a text
    would fit.
    """
    acceptance = acceptance or Acceptance()
    memory = memory_of(hardware, needs).shared(at_once)
    try:
        plans = affordable(needs, memory, prompt, new)
    except FitError as error:
        fits = longest_prompt(needs, memory, prompt, new)
        hint = "No shorter context would fit either."
        if fits:
            hint = f"{fits + new} tokens of context would fit."
        raise FitError(f"{error} {hint}") from error
    if chooser is None:
        chooser = WayChooser(PredictedCosts(hardware, acceptance, at_once))
    choice = chooser.choose(needs, plans, prompt)
    if needs.has_choice:
        needs = needs.with_way(choice.way)
    plan = plans[choice.way]
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
        forecast=forecast(needs, plan, hardware, prompt, new, acceptance, at_once),
    )


def together(needs: TextNeeds, outlook: Outlook, most: int) -> Outlook:
    """Return the text of these needs as one of several: as many as cost each other nothing.

    These are `most` at most, and each keeps on the device what it keeps alone. It is the outlook
    given where shared passes do not pay.
    """
    found = outlook
    # on a GPU short passes are recorded
    pays = sharing_pays(outlook.needs, records=outlook.hardware.runs_ahead)
    for texts in range(2, most + 1 if pays else 2):
        try:
            shared = look_ahead(
                needs,
                outlook.hardware,
                outlook.prompt,
                outlook.new,
                outlook.acceptance,
                at_once=texts,
            )
        except FitError:
            break
        if shared.plan != outlook.plan:
            break
        found = shared
    return found


def plain(outlook: Outlook) -> Outlook | None:
    """Return the same text in plain decoding, which has all the memory to itself.

    None where that does not fit, though it takes less of nearly everything.
    """
    needs = replace(outlook.needs, mode="plain")
    try:
        return look_ahead(needs, outlook.hardware, outlook.prompt, outlook.new)
    except FitError:
        return None


def otherwise(needs: TextNeeds, outlook: Outlook) -> Outlook | None:
    """Return the text of these needs in the same mode with slices, or without where it has them.

    It has a plan of its own. None where a mode with slices was asked for, where there is no layer
    on the host to save, where elements are not cut, and where that does not fit.
    """
    mode = needs.mode if outlook.needs.has_slices else f"sliced-{needs.mode}"
    slicing = outlook.layers_on_host and slice_format(needs.dtype) is not None
    if mode == outlook.needs.mode or mode not in LEVELS or not slicing:
        return None
    try:
        return look_ahead(
            replace(needs, mode=mode, settings=replace(needs.settings, mode=mode)),
            outlook.hardware,
            outlook.prompt,
            outlook.new,
            outlook.acceptance,
        )
    except FitError:
        return None
