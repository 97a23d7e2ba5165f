"""Fitting a request's KV cache into device and host memory."""

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
    """The bytes available to one request on one rank, without the weights."""

    device: int
    host: int
    concurrency: int = 1  # requests sharing the memory equally; the sizes are one share

    def divided(self, concurrency: int) -> Memory:
        """Return one of `concurrency` equal shares."""
        return Memory(self.device // concurrency, self.host // concurrency, concurrency)


def memory_of(hardware: HardwareProfile, requirements: Requirements) -> Memory:
    """Return one rank's memory left by the weights.

    Raises InsufficientMemoryError if the weights alone do not fit.
    """
    weights = requirements.weight_bytes
    if weights >= hardware.device_memory:
        raise InsufficientMemoryError(
            f"the weights alone take {weights / 1e9:.1f} GB per GPU, and each GPU has "
            f"{hardware.device_memory / 1e9:.1f} GB. Use more or larger GPUs, or a smaller model."
        )
    device = int(USABLE_SHARE * (hardware.device_memory - weights))
    return Memory(device, int(hardware.host_memory) // requirements.ranks)


def fit(requirements: Requirements, memory: Memory, prompt: int, max_new_tokens: int) -> MemoryPlan:
    """Plan a request, with as many layers on the device as fit.

    Raises InsufficientMemoryError, stating the required and the available memory.
    """
    settings = requirements.settings
    return plan_memory(
        requirements.memory(prompt, max_new_tokens),
        memory.device,
        memory.host,
        settings.gpu_kv_layers,
        settings.split_kv_layers,
    )


def concurrency_pays(requirements: Requirements, uses_graphs: bool) -> bool:
    """Return whether batching concurrent requests pays, if memory allows it.

    `uses_graphs`: whether short forwards are captured as CUDA graphs. A batched forward needs a new
    capture for each combination of requests, so many forwards are launched eagerly. That must not
    take longer than reading the shared weights, which do not include experts.
    """
    drafting = []
    if requirements.has_retrieval:
        drafting.append((requirements.target, requirements.ranks))
    if requirements.draft is not None and requirements.has_draft:
        drafting.append((requirements.draft, requirements.draft_ranks))
    if not (uses_graphs and drafting):
        return True
    shared = sum(read_bytes(config, ranks, requirements.dtype, 0) for config, ranks in drafting)
    return shared >= SHARED_LAYER_BYTES * sum(config.layers for config, _ in drafting)


def extend_chunk(
    requirements: Requirements, plan: MemoryPlan, prompt: int, max_new_tokens: int
) -> int:
    """Return the largest chunk with which such a sequence can be extended under a plan.

    At least the tokens of the largest decoding forward. Larger chunks use the memory that the plan
    leaves beside such a forward, and the forward's own memory if no CUDA graph holds it.
    """
    memory = requirements.memory(prompt, max_new_tokens)
    _, tiers = device_breakdown(
        memory, plan.resident_layers, plan.deferred_layers, plan.split_layers
    )
    forward = 0 if requirements.settings.graphs else memory.forwards
    room = plan.device_bytes - sum(tiers.values()) + forward
    low, high = requirements.max_forward_tokens, prompt + max_new_tokens
    while low < high:
        middle = ceil_div(low + high, 2)
        if requirements.hidden_bytes(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def feasible_plans(
    requirements: Requirements, memory: Memory, prompt: int, max_new_tokens: int
) -> dict[Strategy, MemoryPlan]:
    """Return the memory plan of each strategy that fits.

    Only budgets that differ for this request are tried, or the configured one alone. A split mode
    is left out if the other mode offloads nothing. If nothing fits, raises the
    InsufficientMemoryError of the strategy that fits the device and lacks the least host memory.
    """
    if not requirements.has_choice:
        return {requirements.strategy: fit(requirements, memory, prompt, max_new_tokens)}
    plans, errors = _plan_all(requirements, memory, prompt, max_new_tokens)
    if plans:
        return plans
    if errors:
        raise errors[_closest(errors)]
    raise InsufficientMemoryError(
        f"`chunk_size` {requirements.settings.chunk_size} is larger than any budget: set "
        "`retrieval_budget`."
    )


def closest_infeasible(
    requirements: Requirements, memory: Memory, prompt: int, max_new_tokens: int
) -> Strategy | None:
    """Return the strategy whose error `feasible_plans` raises if none fits.

    None if there is no strategy at all.
    """
    _, errors = _plan_all(requirements, memory, prompt, max_new_tokens)
    return _closest(errors) if errors else None


def _closest(errors: Mapping[Strategy, InsufficientMemoryError]) -> Strategy:
    """Return the strategy lacking the least host memory, or the first if all lack device memory."""
    lacking_host = {
        strategy: error.host_bytes for strategy, error in errors.items() if error.host_bytes
    }
    return min(lacking_host, key=lacking_host.__getitem__) if lacking_host else next(iter(errors))


def _plan_all(
    requirements: Requirements, memory: Memory, prompt: int, max_new_tokens: int
) -> tuple[dict[Strategy, MemoryPlan], dict[Strategy, InsufficientMemoryError]]:
    """Return the plans of the strategies that fit, and the errors of the others."""
    plans: dict[Strategy, MemoryPlan] = {}
    errors: dict[Strategy, InsufficientMemoryError] = {}
    for mode in requirements.candidate_modes:
        if any(not requirements.uses_link(plan) for plan in plans.values()):
            break
        for strategy, result in _by_budget(requirements, mode, memory, prompt, max_new_tokens):
            if isinstance(result, InsufficientMemoryError):
                errors[strategy] = result
            else:
                plans[strategy] = result
    return plans, errors


def _by_budget(
    requirements: Requirements, mode: str, memory: Memory, prompt: int, max_new_tokens: int
) -> Iterator[tuple[Strategy, MemoryPlan | InsufficientMemoryError]]:
    """Yield each strategy of a mode with its plan or its error."""
    budgets = (
        requirements.candidate_budgets(prompt + max_new_tokens)
        if requirements.selects_budget
        else [requirements.budget]
    )
    shared: MemoryPlan | None = None  # the plan of all budgets if every offloaded layer is split
    for budget in budgets:
        strategy = Strategy(mode, budget)
        if shared is not None:
            yield strategy, shared
            continue
        candidate = requirements.with_strategy(strategy)
        try:
            plan = fit(candidate, memory, prompt, max_new_tokens)
        except InsufficientMemoryError as error:
            yield strategy, error
            continue
        yield strategy, plan
        if not candidate.retrieval_layers(candidate.planned_spec(plan, prompt)):
            shared = plan


def min_budget(requirements: Requirements) -> int:
    """Return the smallest retrieval budget that may be selected."""
    if not requirements.selects_budget:
        return requirements.budget
    return max(RETRIEVAL_BUDGETS[0], requirements.settings.chunk_size)


def max_prompt(requirements: Requirements, memory: Memory, prompt: int, max_new_tokens: int) -> int:
    """Return how many of `prompt` tokens would fit with the best strategy; 0 if none do."""
    if not requirements.has_choice:
        return _max_prompt(requirements, memory, prompt, max_new_tokens)
    strategies = [Strategy(mode, min_budget(requirements)) for mode in requirements.candidate_modes]
    return max(
        _max_prompt(requirements.with_strategy(strategy), memory, prompt, max_new_tokens)
        for strategy in strategies
    )


def _max_prompt(
    requirements: Requirements, memory: Memory, prompt: int, max_new_tokens: int
) -> int:
    """Return how many of `prompt` tokens would fit; 0 if none do."""
    low, high = 0, prompt
    while low < high:
        middle = ceil_div(low + high, 2)
        try:
            fit(requirements, memory, middle, max_new_tokens)
            low = middle
        except InsufficientMemoryError:
            high = middle - 1
    return low
