"""What a text's device memory is spent on: retrieval budget, codes, or whole layers.

A layer more on the device saves its share of a verification's link time. A larger budget raises
acceptance, and makes drafting dearer. Codes raise it more, and leave fewer layers whole. One
chooser weighs them, for a text on this machine as for one on a machine that is only described.
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
    """The way one text is drafted for, and why it is that."""

    strategy: Strategy
    why: str


class StrategySelector:
    """Chooses a mode and a budget for each text; layers take the rest of the memory."""

    def __init__(self, costs: CostSource, prior: HardwarePrior | None = None):
        """Choose by these costs; where they know nothing yet, by `prior`."""
        self.costs = costs
        self.prior = prior
        # of the last text that said something: a change must promise a little
        self.in_use: Strategy | None = None

    def select(
        self, needs: Requirements, plans: Plans, prompt: int, texts: int = 1
    ) -> StrategyChoice:
        """Choose one of the ways that a text of `prompt` tokens was planned with.

        `texts` share its passes, itself among them.
        """
        if len(plans) == 1:
            (way,) = plans
            return StrategyChoice(way, "the only one that fits or differs")
        times = _token_seconds(self.costs, needs, plans, prompt)
        if times:
            return self._best(times, plans)
        if self.prior is not None:
            known = self.prior.trusted(plans, needs.mode)
            costs = self.prior.costs(needs.settings.deterministic, texts)
            choice = self._best(_token_seconds(costs, needs, known, prompt), plans)
            return replace(choice, why=f"by numbers of {self.prior.machine.name}: {choice.why}")
        return self._first(needs, plans, prompt)

    def record(
        self, needs: Requirements, plan: MemoryPlan, prompt: int, rounds: Sequence[RoundStats]
    ) -> None:
        """Take in a text that is over, with the rounds that it took."""
        if self.costs.record(needs, plan, prompt, rounds):
            self.in_use = needs.strategy

    def _best(self, times: Mapping[Strategy, float], plans: Plans) -> StrategyChoice:
        """Choose by the seconds a token, unless the way in use is hardly slower."""
        best = min(times, key=times.__getitem__)
        usual = None if self.in_use is None else _nearest(times, self.in_use)
        if usual is not None and times[best] > SWITCH_THRESHOLD * times[usual]:
            best = usual
        why = f"{1e3 * times[best]:.4g} ms/token predicted with {_kept(plans[best])}"
        others = [way for way in times if way.mode != best.mode]
        others = others or [way for way in times if way != best]
        if not others:
            return StrategyChoice(best, why)
        other = min(others, key=times.__getitem__)
        why += f", {1e3 * times[other]:.4g} with"
        if other.mode != best.mode:
            why += f" mode {other.mode},"
        return StrategyChoice(best, f"{why} budget {other.budget} and {_kept(plans[other])}")

    def _first(self, needs: Requirements, plans: Plans, prompt: int) -> StrategyChoice:
        """Choose where nothing is known: no slices where it fits without.

        The budget is the default, or the largest below it that fits.
        """
        why = "nothing is known of these models yet"
        wanted = Strategy(needs.mode, DEFAULT_RETRIEVAL_BUDGET)
        way = _nearest(plans, wanted)
        if way is None:  # the other mode takes less of the host
            way = _nearest(plans, Strategy(next(iter(plans)).mode, DEFAULT_RETRIEVAL_BUDGET))
            why += f"; {needs.mode} does not fit"
        assert way is not None
        budgets = needs.candidate_budgets(prompt) if needs.selects_budget else []
        refused = [each for each in budgets if way.budget < each <= DEFAULT_RETRIEVAL_BUDGET]
        return StrategyChoice(way, f"{why}; budget {refused[0]} does not fit" if refused else why)


def _token_seconds(
    costs: CostSource, needs: Requirements, plans: Plans, prompt: int
) -> dict[Strategy, float]:
    """Return the seconds a token by way, each with the draft length that suits it."""
    times: dict[Strategy, float] = {}
    for way, plan in plans.items():
        cost = costs.round_cost(needs.with_strategy(way), plan, prompt)
        if cost is not None:
            _, times[way] = cost.best_length(needs.draft_lengths)
    return times


def _nearest(ways: Mapping[Strategy, object], wanted: Strategy) -> Strategy | None:
    """Return the way of this mode with the largest budget that is not above the one wanted.

    It has the smallest if none is, and is None if there is none of this mode.
    """
    alike = {way.budget: way for way in ways if way.mode == wanted.mode}
    if not alike:
        return None
    below = [budget for budget in alike if budget <= wanted.budget]
    return alike[max(below, default=min(alike))]


def _kept(plan: MemoryPlan) -> str:
    """Return what stays on the device, in words."""
    kept = f"{plan.resident_layers} layers on the device"
    return f"{kept}, codes of {plan.split_layers}" if plan.split_layers else kept
