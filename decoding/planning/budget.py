"""What a text's device memory is spent on: retrieval budget, or resident layers.

A layer more on the device saves its share of a verification's link time. A larger budget raises
acceptance, and makes drafting dearer. One chooser weighs them, for a text on this machine as for
one on a machine that is only described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decoding.planning.cost import CostSource
from decoding.planning.defaults import DEFAULT_BUDGET, WORTHWHILE_SHARE
from decoding.planning.needs import TextNeeds
from decoding.speculation.draft_length import RoundStats
from offload.memory_plan import MemoryPlan


@dataclass(frozen=True)
class BudgetChoice:
    """The retrieval budget of one text. None: nothing was to be chosen."""

    budget: int | None
    why: str


class BudgetChooser:
    """Chooses a budget for each text; layers take the rest of the memory."""

    def __init__(self, costs: CostSource):
        self.costs = costs
        # the budget of the last text that said something: a change must promise a little
        self.in_use: int | None = None

    def choose(
        self, needs: TextNeeds, plans: Mapping[int, MemoryPlan], prompt: int
    ) -> BudgetChoice:
        """Choose one of the budgets that a text of `prompt` tokens was planned with."""
        if len(plans) == 1:
            (budget,) = plans
            return BudgetChoice(budget, "the only one that fits or differs")
        times = self._token_seconds(needs, plans, prompt)
        if not times:
            return self._first(needs, plans, prompt)
        best = min(times, key=times.__getitem__)
        if self.in_use is not None:
            usual = _nearest_below(plans, self.in_use)
            if times[best] > WORTHWHILE_SHARE * times[usual]:
                best = usual
        other = min((budget for budget in times if budget != best), key=times.__getitem__)
        return BudgetChoice(
            best,
            f"{1e3 * times[best]:.4g} ms/token predicted with {plans[best].resident_layers} layers "
            f"on the device, {1e3 * times[other]:.4g} with budget {other} and "
            f"{plans[other].resident_layers} layers",
        )

    def record(
        self, needs: TextNeeds, plan: MemoryPlan, prompt: int, rounds: Sequence[RoundStats]
    ) -> None:
        """Take in a text that is over, with the rounds that it took."""
        if self.costs.record(needs, plan, prompt, rounds):
            self.in_use = needs.budget

    def _first(
        self, needs: TextNeeds, plans: Mapping[int, MemoryPlan], prompt: int
    ) -> BudgetChoice:
        """Choose where nothing is known: the default, or the largest below it that fits."""
        budget = _nearest_below(plans, DEFAULT_BUDGET)
        refused = [each for each in needs.budgets(prompt) if budget < each <= DEFAULT_BUDGET]
        why = "nothing is known of these models yet"
        return BudgetChoice(budget, f"{why}; {refused[0]} does not fit" if refused else why)

    def _token_seconds(
        self, needs: TextNeeds, plans: Mapping[int, MemoryPlan], prompt: int
    ) -> dict[int, float]:
        """Return the seconds a token by budget, each with the draft length that suits it."""
        times: dict[int, float] = {}
        for budget, plan in plans.items():
            cost = self.costs.round_cost(needs.with_budget(budget), plan, prompt)
            if cost is not None:
                _, times[budget] = cost.best_length(needs.draft_lengths)
        return times


def _nearest_below(budgets: Mapping[int, MemoryPlan], wanted: int) -> int:
    """Return the largest budget that is not above the one wanted; the smallest if none is."""
    return max((budget for budget in budgets if budget <= wanted), default=min(budgets))
