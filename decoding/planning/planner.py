"""The planner of an engine and of `tierforce plan`: mode, budget and placement of each request.

Device memory can hold whole layers, retrieval budget or high bytes, and selected keys beside these.
Each whole layer saves its share of a verification's transfer. A larger budget raises acceptance and
makes drafting more expensive. High bytes raise acceptance further and leave room for fewer whole
layers, as do selected keys. Mode and budgets are those that the cost model predicts to be fastest;
layers get the rest of the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import log2

from decoding.config.defaults import (
    DEFAULT_RETRIEVAL_BUDGET,
    SWITCH_THRESHOLD,
    USABLE_SHARE,
)
from decoding.config.settings import LEVELS
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import Trust
from decoding.planning.plan import Memory, Plan, split_tokens
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import (
    Requirements,
    Strategy,
    candidate_budgets,
    candidate_split_budgets,
)
from decoding.planning.round_cost import rejection_ratio
from decoding.speculation.draft_length import RoundStats
from offload.codec.format import split_format
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div

Candidates = Mapping[Strategy, Plan]


class Planner:
    """Plans requests on one rank, with the mode and budget that are predicted to be fastest."""

    def __init__(self, requirements: Requirements, costs: CostModel):
        self.requirements, self.costs = requirements, costs
        # Strategy of the last informative request; switching needs a predicted gain.
        self._in_use: Strategy | None = None

    def plan(self, prompt: int, max_new_tokens: int, concurrency: int = 1) -> Plan:
        """Plan a request on the machine of the cost model's profile.

        It is one of `concurrency` requests, which share the memory and each batch. Raises
        InsufficientMemoryError, stating the longest context that would fit, and how many such
        requests.
        """
        memory = self._memory(concurrency)
        try:
            return self.choose(self.candidates(prompt, max_new_tokens, memory))
        except InsufficientMemoryError as error:
            longest = self.longest_prompt(prompt, max_new_tokens, memory)
            context = longest + max_new_tokens if longest else 0
            hint = "No shorter context would fit either."
            if context:
                hint = f"{context} tokens of context would fit."
            if concurrency > 1 and (
                fitting := self._fitting_concurrency(prompt, max_new_tokens, concurrency)
            ):
                hint += f" With `concurrency` {fitting} it would fit."
            raise InsufficientMemoryError(f"{error} {hint}", error.host_bytes, context) from error

    def candidates(self, prompt: int, max_new_tokens: int, memory: Memory) -> dict[Strategy, Plan]:
        """Return the plan of each strategy that fits; only those that differ for this request.

        A split mode is left out if the other mode offloads nothing. If nothing fits, raises the
        InsufficientMemoryError of the strategy that fits the device and lacks the least host
        memory.
        """
        return _candidates(self.requirements, prompt, max_new_tokens, memory)

    def fits(self, prompt: int, max_new_tokens: int, memory: Memory) -> bool:
        """Return whether a request fits this memory in any strategy."""
        return _fits_any(self.requirements, prompt, max_new_tokens, memory)

    def choose(self, candidates: Candidates) -> Plan:
        """Return the plan of the fastest strategy, or of the one in use if it is hardly slower."""
        if len(candidates) == 1:
            (plan,) = candidates.values()
            reason = "the only one that fits or differs" if self.requirements.has_choice else "set"
            return replace(plan, reason=reason)
        if not self.costs.calibration.is_empty:
            return self._fastest(candidates)
        if self.costs.trust is Trust.NONE:
            return self._default(candidates)
        plan = self._fastest(self._trusted(candidates))
        name = self.costs.hardware.name
        return replace(plan, reason=f"by the numbers of {name}: {plan.reason}")

    def record(self, plan: Plan, rounds: Sequence[RoundStats]) -> None:
        """Record a finished request with its rounds."""
        if self.costs.record(plan, rounds):
            self._in_use = plan.requirements.strategy

    def alternatives(self, plan: Plan) -> list[Plan]:
        """Return the plans of the same request with plain decoding, and with or without split KV.

        Each gets all the memory. One that does not fit is left out, and so is the split variant if
        another mode is set, the dtype cannot be split or all layers are resident.
        """
        needs = self.requirements
        others = [replace(plan.requirements, mode="plain")]
        mode = needs.mode if plan.requirements.has_split else f"split-{needs.mode}"
        can_split = plan.layers_on_host and split_format(needs.dtype) is not None
        if mode != plan.requirements.mode and mode in LEVELS and can_split:
            others.append(replace(needs, mode=mode, settings=replace(needs.settings, mode=mode)))
        plans = []
        for requirements in others:
            with suppress(InsufficientMemoryError):
                plans.append(Planner(requirements, self.costs)._plan_same_size(plan))
        return plans

    def max_concurrent(self, plan: Plan, limit: int) -> Plan:
        """Return the plan with the most requests, at most `limit`, each as on its own."""
        return max_concurrent(lambda count: self._plan_same_size(plan, count), limit, plan)

    def longest_prompt(self, prompt: int, max_new_tokens: int, memory: Memory) -> int:
        """Return how many of `prompt` tokens would fit with the best strategy; 0 if none do."""
        needs, fixed = self.requirements, [self.requirements]
        if needs.has_choice:
            budget = candidate_budgets(needs, 0)[0]
            fixed = [needs.with_strategy(Strategy(mode, budget)) for mode in needs.candidate_modes]
        return _largest(
            prompt,
            lambda size: any(
                _fits(RequestSpec(each, size, max_new_tokens), memory) for each in fixed
            ),
        )

    def _fitting_concurrency(self, prompt: int, max_new_tokens: int, limit: int) -> int:
        """Return how many requests of this size, at most `limit`, would fit; 0 if none does."""
        return _largest(limit, lambda count: self.fits(prompt, max_new_tokens, self._memory(count)))

    def _plan_same_size(self, plan: Plan, concurrency: int = 1) -> Plan:
        """Plan a request of the size of another one's plan; its error has no hint."""
        size = plan.spec.prompt, plan.spec.max_new_tokens
        return self.choose(self.candidates(*size, self._memory(concurrency)))

    def _memory(self, concurrency: int) -> Memory:
        return Memory.of(self.costs.hardware, self.requirements).divided(concurrency)

    def _fastest(self, candidates: Candidates) -> Plan:
        """Return the fastest plan, or the one in use if it is hardly slower."""
        times = {strategy: self.costs.token_s(plan) for strategy, plan in candidates.items()}
        best = min(times, key=times.__getitem__)
        current = None if self._in_use is None else _closest(times, self._in_use)
        if current is not None and times[best] > SWITCH_THRESHOLD * times[current]:
            best = current
        why = f"{1e3 * times[best]:.4g} ms/token predicted with {_placement(candidates[best])}"
        others = [strategy for strategy in times if strategy.mode != best.mode]
        others = others or [strategy for strategy in times if strategy != best]
        if others:
            other = min(others, key=times.__getitem__)
            why += f", {1e3 * times[other]:.4g} with"
            if other.mode != best.mode:
                why += f" mode {other.mode},"
            why += f" budget {other.budget} and {_placement(candidates[other])}"
        return replace(candidates[best], reason=why)

    def _trusted(self, candidates: Candidates) -> Candidates:
        """Return the candidates between which the profile may choose.

        They include split modes if nothing else fits.
        """
        if self.costs.trust is Trust.ALL:
            return candidates
        mode = self.requirements.mode
        unsplit = {key: plan for key, plan in candidates.items() if key.mode == mode}
        return unsplit or candidates

    def _default(self, candidates: Candidates) -> Plan:
        """Return a plan without any numbers: of an unsplit mode if it fits.

        The retrieval budget is the default, or the largest smaller one that fits. That of split
        layers leaves the fewest rejections: it may take the place of layers.
        """
        needs, why = self.requirements, "no measurements of these models yet"
        strategy = _closest(candidates, Strategy(needs.mode, DEFAULT_RETRIEVAL_BUDGET))
        if strategy is None:  # the split mode needs less host memory
            mode = next(iter(candidates)).mode
            strategy = _closest(candidates, Strategy(mode, DEFAULT_RETRIEVAL_BUDGET))
            why += f"; {needs.mode} does not fit"
        assert strategy is not None
        same = [key for key in candidates if replace(key, split_budget=0) == strategy]
        strategy = min(same, key=lambda key: rejection_ratio(candidates[key]), default=strategy)
        plan = candidates[strategy]
        budgets = candidate_budgets(needs, plan.spec.prompt) if needs.selects_budget else []
        larger = [size for size in budgets if strategy.budget < size <= DEFAULT_RETRIEVAL_BUDGET]
        if larger:
            why += f"; budget {larger[0]} does not fit"
        return replace(plan, reason=why)


def fitting_requirements(
    requirements: Requirements,
    prompt: int,
    max_new_tokens: int,
    device_memory: float,
    usable_share: float = USABLE_SHARE,
) -> Requirements:
    """Return the requirements; without the target's prediction block if a request fits only so.

    Args:
        requirements: with the block, if the model has one; with mode `auto` it may be left out.
        prompt: tokens of the request.
        max_new_tokens: its new tokens.
        device_memory: bytes of a rank for weights and caches; host memory is not considered.
        usable_share: the share for caches in what the weights leave.
    """
    draft, settings = requirements.draft, requirements.settings
    if draft is None or not draft.is_predictor or settings.mode != "auto":
        return requirements
    mode = settings.resolved_mode(False, requirements.target.full_layers)
    without = replace(requirements, draft=None, draft_ranks=1, mode=mode)
    for needs in (requirements, without):
        device = int(usable_share * (device_memory - needs.weight_bytes))
        if _fits_any(needs, prompt, max_new_tokens, Memory(device, sys.maxsize)):
            return needs
    return requirements


def max_concurrent(
    plan: Callable[[int], Plan],
    limit: int,
    alone: Plan | None = None,
    any_rank: Callable[[bool], bool] = bool,
) -> Plan:
    """Return the plan with the most requests that each keep on the device what they keep alone.

    Raises InsufficientMemoryError if one alone does not fit.

    Args:
        plan: returns the plan of a request that is one of this many.
        limit: the maximum number.
        alone: `plan(1)`, if it is known.
        any_rank: whether a condition holds on any rank.
    """
    best = alone = alone or plan(1)
    for count in range(2, limit + 1):
        try:
            shared = plan(count)
        except InsufficientMemoryError:
            break
        same_place = shared.memory.placement == alone.memory.placement
        if any_rank(
            not (same_place and shared.requirements.strategy == alone.requirements.strategy)
        ):
            break
        best = shared
    return best


def _candidates(
    needs: Requirements, prompt: int, max_new_tokens: int, memory: Memory
) -> dict[Strategy, Plan]:
    """Return plans as `Planner.candidates`."""
    plans: dict[Strategy, Plan] = {}
    errors: list[InsufficientMemoryError] = []
    for mode in needs.candidate_modes:
        if any(not plan.uses_link for plan in plans.values()):
            break
        for result in _by_budget(needs, mode, prompt, max_new_tokens, memory):
            if isinstance(result, Plan):
                plans[result.requirements.strategy] = result
            else:
                errors.append(result)
    if plans:
        return plans
    lacking_host = [error for error in errors if error.host_bytes]
    raise min(lacking_host or errors[:1], key=lambda each: each.host_bytes)


def _fits_any(needs: Requirements, prompt: int, max_new_tokens: int, memory: Memory) -> bool:
    """Return whether a request fits this memory in any strategy."""
    try:
        return bool(_candidates(needs, prompt, max_new_tokens, memory))
    except InsufficientMemoryError:
        return False


def _by_budget(
    needs: Requirements, mode: str, prompt: int, max_new_tokens: int, memory: Memory
) -> Iterator[Plan | InsufficientMemoryError]:
    """Yield a mode's plan or error with each budget of split layers, and each retrieval budget."""
    context = prompt + max_new_tokens
    split_budgets = candidate_split_budgets(replace(needs, mode=mode), context)
    for split_budget in split_budgets:
        shared: Plan | None = None  # the plan of all retrieval budgets if no layer has one
        for budget in candidate_budgets(needs, context):
            strategy = Strategy(mode, budget, split_budget)
            fixed = needs.with_strategy(strategy) if needs.has_choice else needs
            spec = RequestSpec(fixed, prompt, max_new_tokens)
            if shared is not None:
                yield replace(shared, spec=spec)
                continue
            try:
                plan = Plan.place(spec, memory)
            except InsufficientMemoryError as error:
                yield error
                continue
            if split_budget and not plan.memory.split_layers and len(split_budgets) > 1:
                continue  # the same without a budget
            yield plan
            if not plan.retrieval_layers:
                shared = plan


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, as all smaller ones do; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = ceil_div(low + high, 2)
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(spec: RequestSpec, memory: Memory) -> bool:
    try:
        Plan.place(spec, memory)
    except InsufficientMemoryError:
        return False
    return True


def _closest(strategies: Mapping[Strategy, object], reference: Strategy) -> Strategy | None:
    """Return the strategy of the same mode with the largest budget up to that of `reference`.

    If all are larger, it has the smallest one. Before that counts the budget of split layers: the
    nearest one, none for none. None if no strategy has this mode.
    """
    same_mode = [strategy for strategy in strategies if strategy.mode == reference.mode]
    wanted = reference.split_budget
    if not same_mode:
        return None
    split_budgets = {each.split_budget for each in same_mode}
    # candidates are powers of two, with the context: another request's may be others
    nearest = min(split_budgets, key=lambda size: abs(log2(size or 1) - log2(wanted or 1)))
    same_mode = [each for each in same_mode if each.split_budget == nearest]
    smaller = [each.budget for each in same_mode if each.budget <= reference.budget]
    budget = max(smaller, default=min(each.budget for each in same_mode))
    return next(each for each in same_mode if each.budget == budget)


def _placement(plan: Plan) -> str:
    """Return a description of the layers on the device."""
    words = f"{plan.memory.resident_layers} layers on the device"
    if split := plan.memory.split_layers:
        words += f", high bytes of {split}"
    if budget := split_tokens(plan):
        words += f" and exact keys of {budget} tokens"
    return words
