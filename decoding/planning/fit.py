"""Where the KV of a text goes, given what the text needs and the memory that there is."""

from __future__ import annotations

from dataclasses import dataclass

from decoding.planning.defaults import BUDGETS, USABLE_SHARE
from decoding.planning.needs import TextNeeds
from decoding.planning.profile import HardwareProfile
from offload.errors import FitError
from offload.layout import ceil_div
from offload.memory_plan import MemoryPlan, plan_memory


@dataclass(frozen=True)
class Memory:
    """The bytes that one rank may use for a text, beside the weights."""

    device: int
    host: int


def memory_of(hardware: HardwareProfile, needs: TextNeeds) -> Memory:
    """Return what the weights leave of a machine's memory to one rank.

    Raises FitError where the weights alone are too large.
    """
    weights = needs.weight_bytes
    if weights >= hardware.device_memory:
        raise FitError(
            f"the weights alone take {weights / 1e9:.1f} GB of each GPU of "
            f"{hardware.device_memory / 1e9:.1f} GB. It would take more GPUs, larger ones, or a "
            "smaller model."
        )
    device = int(USABLE_SHARE * (hardware.device_memory - weights))
    return Memory(device, int(hardware.host_memory) // needs.ranks)


def fit(needs: TextNeeds, memory: Memory, prompt: int, new: int) -> MemoryPlan:
    """Plan a text of `prompt` + `new` tokens: as many layers on the device as fit.

    Raises FitError, which says what is needed and what there is.
    """
    wanted = needs.memory(prompt, new)
    settings = needs.settings
    return plan_memory(
        wanted, memory.device, memory.host, settings.resident_layers, settings.sliced_layers
    )


def affordable(needs: TextNeeds, memory: Memory, prompt: int, new: int) -> dict[int, MemoryPlan]:
    """Return where a text's KV would go, by retrieval budget, for the budgets that fit.

    Only budgets that differ for this text are tried; one that is set is the only one. Raises
    FitError where none fits.
    """
    if not needs.chooses_budget:
        return {needs.budget: fit(needs, memory, prompt, new)}
    plans: dict[int, MemoryPlan] = {}
    refusal: FitError | None = None
    for budget in needs.budgets(prompt + new):
        try:
            plan = fit(needs.with_budget(budget), memory, prompt, new)
        except FitError as error:
            refusal = refusal or error
            continue
        plans[budget] = plan
        if not needs.retrieval_layers(needs.placed(plan, prompt)):
            # all layers have codes: no budget makes a difference
            return dict.fromkeys(needs.budgets(prompt + new), plan)
    if not plans:
        raise refusal or FitError(
            f"`chunk_size` {needs.settings.chunk_size} is larger than any budget: give `budget`."
        )
    return plans


def longest_prompt(needs: TextNeeds, memory: Memory, prompt: int, new: int) -> int:
    """Return how many prompt tokens, at most `prompt`, would fit with any budget; 0 if none do."""
    if needs.chooses_budget:
        needs = needs.with_budget(max(BUDGETS[0], needs.settings.chunk_size))
    low, high = 0, prompt
    while low < high:
        middle = ceil_div(low + high, 2)
        try:
            fit(needs, memory, middle, new)
            low = middle
        except FitError:
            high = middle - 1
    return low
