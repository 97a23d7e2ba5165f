"""Strategy selection: spending device memory on retrieval budget, high bytes or whole layers.

Each additional layer on the device saves its share of a verification's transfer time. A larger
budget raises acceptance and makes drafting more expensive. High bytes raise acceptance further and
leave room for fewer whole layers. The engine and `tierforce plan` use the same selector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decoding.config.defaults import DEFAULT_RETRIEVAL_BUDGET, SWITCH_THRESHOLD
from decoding.planning.cost import CostSource
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Requirements, Strategy
from decoding.planning.prior import HardwarePrior
from decoding.speculation.draft_length import RoundStats

Plans = Mapping[Strategy, MemoryPlan]


@dataclass(frozen=True)
class StrategyChoice:
    """The strategy selected for one request, and the reason."""

    strategy: Strategy
    why: str


class StrategySelector:
    """Selects mode and budget per request; layers get the rest of the memory."""

    def __init__(self, costs: CostSource, prior: HardwarePrior | None = None):
        """Select by `costs`, or by `prior` as long as they are unknown."""
        self.costs = costs
        self.prior = prior
        # Strategy of the last informative request; switching needs a predicted gain.
        self.in_use: Strategy | None = None

    def select(
        self, requirements: Requirements, plans: Plans, prompt: int, concurrency: int = 1
    ) -> StrategyChoice:
        """Select one of the planned strategies for a request of `prompt` tokens.

        It is one of `concurrency` requests in a batch.
        """
        if len(plans) == 1:
            (strategy,) = plans
            return StrategyChoice(strategy, "the only one that fits or differs")
        times = _token_seconds(self.costs, requirements, plans, prompt)
        if times:
            return self._best(times, plans)
        if self.prior is not None:
            candidates = self.prior.trusted(plans, requirements.mode)
            costs = self.prior.costs(requirements.settings.deterministic, concurrency)
            choice = self._best(_token_seconds(costs, requirements, candidates, prompt), plans)
            return replace(choice, why=f"by the numbers of {self.prior.machine.name}: {choice.why}")
        return self._first(requirements, plans, prompt)

    def record(
        self,
        requirements: Requirements,
        plan: MemoryPlan,
        prompt: int,
        rounds: Sequence[RoundStats],
    ) -> None:
        """Record a finished request with its rounds."""
        if self.costs.record(requirements, plan, prompt, rounds):
            self.in_use = requirements.strategy

    def _best(self, times: Mapping[Strategy, float], plans: Plans) -> StrategyChoice:
        """Select the fastest strategy, or the one in use if it is hardly slower."""
        best = min(times, key=times.__getitem__)
        current = None if self.in_use is None else _closest(times, self.in_use)
        if current is not None and times[best] > SWITCH_THRESHOLD * times[current]:
            best = current
        why = f"{1e3 * times[best]:.4g} ms/token predicted with {_placement(plans[best])}"
        others = [strategy for strategy in times if strategy.mode != best.mode]
        others = others or [strategy for strategy in times if strategy != best]
        if not others:
            return StrategyChoice(best, why)
        other = min(others, key=times.__getitem__)
        why += f", {1e3 * times[other]:.4g} with"
        if other.mode != best.mode:
            why += f" mode {other.mode},"
        return StrategyChoice(best, f"{why} budget {other.budget} and {_placement(plans[other])}")

    def _first(self, requirements: Requirements, plans: Plans, prompt: int) -> StrategyChoice:
        """Select without any measurements: an unsplit mode if it fits.

        The budget is the default, or the largest smaller one that fits.
        """
        why = "no measurements of these models yet"
        default = Strategy(requirements.mode, DEFAULT_RETRIEVAL_BUDGET)
        strategy = _closest(plans, default)
        if strategy is None:  # the split mode needs less host memory
            strategy = _closest(plans, Strategy(next(iter(plans)).mode, DEFAULT_RETRIEVAL_BUDGET))
            why += f"; {requirements.mode} does not fit"
        assert strategy is not None
        budgets = requirements.candidate_budgets(prompt) if requirements.selects_budget else []
        larger = [size for size in budgets if strategy.budget < size <= DEFAULT_RETRIEVAL_BUDGET]
        return StrategyChoice(
            strategy, f"{why}; budget {larger[0]} does not fit" if larger else why
        )


def _token_seconds(
    costs: CostSource, requirements: Requirements, plans: Plans, prompt: int
) -> dict[Strategy, float]:
    """Return the seconds per token of each strategy with its best draft length."""
    times: dict[Strategy, float] = {}
    for strategy, plan in plans.items():
        cost = costs.round_cost(requirements.with_strategy(strategy), plan, prompt)
        if cost is not None:
            _, times[strategy] = cost.best_length(requirements.draft_lengths)
    return times


def _closest(strategies: Mapping[Strategy, object], reference: Strategy) -> Strategy | None:
    """Return the strategy of the same mode with the largest budget up to that of `reference`.

    If all budgets are larger, the smallest one; None if no strategy has this mode.
    """
    same_mode = {
        strategy.budget: strategy for strategy in strategies if strategy.mode == reference.mode
    }
    if not same_mode:
        return None
    smaller = [budget for budget in same_mode if budget <= reference.budget]
    return same_mode[max(smaller, default=min(same_mode))]


def _placement(plan: MemoryPlan) -> str:
    """Return a description of the layers on the device."""
    words = f"{plan.resident_layers} layers on the device"
    return f"{words}, high bytes of {plan.split_layers}" if plan.split_layers else words
