"""Where the KV of a text goes, given what the text needs and the memory that there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from decoding.config.defaults import RETRIEVAL_BUDGETS, SHARED_LAYER_BYTES, USABLE_SHARE
from decoding.planning.forward_cost import read_bytes
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan, device_breakdown, plan_memory
from decoding.planning.memory_requirements import Requirements, Strategy
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div


@dataclass(frozen=True)
class Memory:
    """The bytes that one rank may use for a text, beside the weights."""

    device: int
    host: int
    concurrency: int = 1  # that share the memory equally; this is the share of one

    def divided(self, texts: int) -> Memory:
        """Return an equal share of it for each of so many texts."""
        return Memory(self.device // texts, self.host // texts, texts)


def memory_of(hardware: HardwareProfile, needs: Requirements) -> Memory:
    """Return what the weights leave of a machine's memory to one rank.

    Raises InsufficientMemoryError where the weights alone are too large.
    """
    weights = needs.weight_bytes
    if weights >= hardware.device_memory:
        raise InsufficientMemoryError(
            f"the weights alone take {weights / 1e9:.1f} GB of each GPU of "
            f"{hardware.device_memory / 1e9:.1f} GB. It would take more GPUs, larger ones, or a "
            "smaller model."
        )
    device = int(USABLE_SHARE * (hardware.device_memory - weights))
    return Memory(device, int(hardware.host_memory) // needs.ranks)


def fit(needs: Requirements, memory: Memory, prompt: int, new: int) -> MemoryPlan:
    """Plan a text of `prompt` + `new` tokens: as many layers on the device as fit.

    Raises InsufficientMemoryError, which says what is needed and what there is.
    """
    settings = needs.settings
    return plan_memory(
        needs.memory(prompt, new),
        memory.device,
        memory.host,
        settings.gpu_kv_layers,
        settings.split_kv_layers,
    )


def concurrency_pays(needs: Requirements, records: bool) -> bool:
    """Return whether several texts are to share passes, if memory allows.

    `records`: whether short passes are recorded as CUDA graphs. Those that texts share are recorded
    for each combination of texts anew, so many are launched: that must take no longer than reading
    the weights that they share, which experts are not.
    """
    recorded = []
    if needs.has_retrieval:
        recorded.append((needs.target, needs.ranks))
    if needs.draft is not None and needs.has_draft:
        recorded.append((needs.draft, needs.draft_ranks))
    if not (records and recorded):
        return True
    shared = sum(read_bytes(config, ranks, needs.dtype, 0) for config, ranks in recorded)
    return shared >= SHARED_LAYER_BYTES * sum(config.layers for config, _ in recorded)


def extend_chunk(needs: Requirements, plan: MemoryPlan, prompt: int, new: int) -> int:
    """Return how many tokens may be read at once behind such a text, where that is planned so.

    They are no fewer than a pass takes. More have the memory that the plan leaves beside a pass,
    and that of a pass where none is recorded.
    """
    wanted = needs.memory(prompt, new)
    _, tiers = device_breakdown(
        wanted, plan.resident_layers, plan.deferred_layers, plan.split_layers
    )
    passes = 0 if needs.settings.graphs else wanted.forwards
    room = plan.device_bytes - sum(tiers.values()) + passes
    low, high = needs.max_forward_tokens, prompt + new
    while low < high:
        middle = ceil_div(low + high, 2)
        if needs.hidden_bytes(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def feasible_plans(
    needs: Requirements, memory: Memory, prompt: int, new: int
) -> dict[Strategy, MemoryPlan]:
    """Return where a text's KV would go, by mode and retrieval budget, for those that fit.

    Only budgets that differ for this text are tried; one that is set is the only one. A mode with
    slices is none where the other keeps nothing on the host. Raises InsufficientMemoryError where nothing fits: of
    the ways that the device has room for, the one that lacks least of the host.
    """
    if not needs.has_choice:
        return {needs.strategy: fit(needs, memory, prompt, new)}
    plans, refusals = _plan_all(needs, memory, prompt, new)
    if plans:
        return plans
    if refusals:
        raise refusals[_closest(refusals)]
    raise InsufficientMemoryError(
        f"`chunk_size` {needs.settings.chunk_size} is larger than any budget: give `retrieval_budget`."
    )


def closest_infeasible(
    needs: Requirements, memory: Memory, prompt: int, new: int
) -> Strategy | None:
    """Return the way of a text that fits in none which `feasible_plans` says to be refused.

    None where there is no way at all.
    """
    _, refusals = _plan_all(needs, memory, prompt, new)
    return _closest(refusals) if refusals else None


def _closest(refusals: Mapping[Strategy, InsufficientMemoryError]) -> Strategy:
    """Return the way that lacks least of the host alone; the first where all lack of the device."""
    on_host = {way: refusal.host_bytes for way, refusal in refusals.items() if refusal.host_bytes}
    return min(on_host, key=on_host.__getitem__) if on_host else next(iter(refusals))


def _plan_all(
    needs: Requirements, memory: Memory, prompt: int, new: int
) -> tuple[dict[Strategy, MemoryPlan], dict[Strategy, InsufficientMemoryError]]:
    """Return the plans of ways that fit, and what speaks against the others."""
    plans: dict[Strategy, MemoryPlan] = {}
    refusals: dict[Strategy, InsufficientMemoryError] = {}
    for mode in needs.candidate_modes:
        if any(not needs.uses_link(plan) for plan in plans.values()):
            break
        for way, found in _by_budget(needs, mode, memory, prompt, new):
            if isinstance(found, InsufficientMemoryError):
                refusals[way] = found
            else:
                plans[way] = found
    return plans, refusals


def _by_budget(
    needs: Requirements, mode: str, memory: Memory, prompt: int, new: int
) -> Iterator[tuple[Strategy, MemoryPlan | InsufficientMemoryError]]:
    """Yield each way of a mode with its plan, or with what speaks against it."""
    budgets = needs.candidate_budgets(prompt + new) if needs.selects_budget else [needs.budget]
    everywhere: MemoryPlan | None = None  # where no budget makes a difference: all have codes
    for budget in budgets:
        way = Strategy(mode, budget)
        if everywhere is not None:
            yield way, everywhere
            continue
        chosen = needs.with_strategy(way)
        try:
            plan = fit(chosen, memory, prompt, new)
        except InsufficientMemoryError as error:
            yield way, error
            continue
        yield way, plan
        if not chosen.retrieval_layers(chosen.planned_spec(plan, prompt)):
            everywhere = plan


def min_budget(needs: Requirements) -> int:
    """Return the smallest retrieval budget that a text may get."""
    if not needs.selects_budget:
        return needs.budget
    return max(RETRIEVAL_BUDGETS[0], needs.settings.chunk_size)


def max_prompt(needs: Requirements, memory: Memory, prompt: int, new: int) -> int:
    """Return how many prompt tokens, at most `prompt`, would fit in any way; 0 if none do."""
    if not needs.has_choice:
        return _max_prompt(needs, memory, prompt, new)
    ways = [Strategy(mode, min_budget(needs)) for mode in needs.candidate_modes]
    return max(_max_prompt(needs.with_strategy(way), memory, prompt, new) for way in ways)


def _max_prompt(needs: Requirements, memory: Memory, prompt: int, new: int) -> int:
    """Return how many prompt tokens, at most `prompt`, would fit; 0 if none do."""
    low, high = 0, prompt
    while low < high:
        middle = ceil_div(low + high, 2)
        try:
            fit(needs, memory, middle, new)
            low = middle
        except InsufficientMemoryError:
            high = middle - 1
    return low
