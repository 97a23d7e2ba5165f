"""What past texts showed of the cost of a round.

Link time follows from bytes and the link's rate. Rejections, and the seconds of drafting and of
verifying, are those of past texts: a text's budget then depends on texts before it alone, and its
output law is what it would be with any budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoding.planning.cost import RoundCost, accepted_with, link_bytes
from decoding.planning.defaults import (
    COMPUTE_BOUND_RATIO,
    DEFAULT_BUDGET,
    KEPT_OF_TEXT,
    MIN_ROUNDS,
    OWN_TOKENS,
    PRIOR_REJECTION,
    PRIOR_TOKENS,
    REJECTION_EXPONENT,
)
from decoding.planning.needs import TextNeeds, weight_bytes
from decoding.speculation.draft_length import RoundStats
from offload.memory_plan import MemoryPlan


@dataclass
class BudgetHistory:
    """What texts with one budget showed."""

    tested: float = 0.0  # tokens
    rejected: float = 0.0
    drafted_s: float = 0.0  # of a drafted token


class ObservedCosts:
    """The costs of rounds by what past texts showed, and by the rate of the link."""

    def __init__(self, link_rate: float | None):
        """Begin without texts. `link_rate`: bytes a second; None where nothing is copied."""
        self.link_rate = link_rate
        self._history: dict[int, BudgetHistory] = {}
        # of the last text's verifications: what they took, and the link's part of it
        self._verify_s = self._link_s = 0.0

    def record(
        self, needs: TextNeeds, plan: MemoryPlan, prompt: int, rounds: Sequence[RoundStats]
    ) -> bool:
        """Take in a text that is over; return whether it said anything.

        One that its budget held whole says nothing of longer texts: its proposals are the target's
        own. Nor does one with slices, of which it cannot be told what codes and what the budget
        did.
        """
        if needs.has_slices:
            return False
        budget = needs.budget
        drafted = [each for each in rounds if each.drafted]
        if len(drafted) < MIN_ROUNDS or prompt <= budget:
            return False
        stood = sum(each.accepted for each in drafted)
        rejected = sum(each.accepted < each.drafted for each in drafted)
        past = self._history.setdefault(budget, BudgetHistory())
        past.tested = KEPT_OF_TEXT * past.tested + (stood + rejected)
        past.rejected = KEPT_OF_TEXT * past.rejected + rejected
        past.drafted_s = _median(each.draft_s / each.drafted for each in drafted)
        self._verify_s = _median(each.verify_s for each in drafted)
        self._link_s = self._over_link_s(needs, plan, prompt)
        return True

    def round_cost(self, needs: TextNeeds, plan: MemoryPlan, prompt: int) -> RoundCost | None:
        if not self._history:
            return None
        # compute is hidden behind the link, as far as is known, unless it is plainly the cost
        bound_by_compute = self._verify_s > COMPUTE_BOUND_RATIO * self._link_s
        compute = self._verify_s if bound_by_compute else 0.0
        return RoundCost(
            link_s=self._over_link_s(needs, plan, prompt),
            compute_s=lambda drafted: compute,
            drafted_s=self._drafted_s(needs),
            acceptance=1 - self.rejection(needs.budget),
            other_s=max(0.0, self._verify_s - max(self._link_s, compute)),
        )

    def rejection(self, budget: int) -> float:
        """Return how often a drafted token is rejected when all before it stand.

        All texts have a say, those with this budget more than others.
        """
        rejected = sum(past.rejected for past in self._history.values())
        # tokens, as if all had been tested with the default budget
        tested = sum(
            past.tested * (seen / DEFAULT_BUDGET) ** -REJECTION_EXPONENT
            for seen, past in self._history.items()
        )
        usual = (PRIOR_REJECTION * PRIOR_TOKENS + rejected) / (PRIOR_TOKENS + tested)
        expected = 1 - accepted_with(1 - usual, budget / DEFAULT_BUDGET)
        own = self._history.get(budget, BudgetHistory())
        return (own.rejected + OWN_TOKENS * expected) / (own.tested + OWN_TOKENS)

    def _drafted_s(self, needs: TextNeeds) -> float:
        """Return the seconds of a drafted token.

        Those of a budget not seen follow from the nearest that was, by what a retrieval pass reads.
        """
        budget = needs.budget
        near = min(self._history, key=lambda seen: (max(seen, budget) / min(seen, budget), seen))
        layout = needs.layout
        weights = weight_bytes(needs.target, needs.ranks, needs.dtype)
        read, read_near = (weights + layout.bytes(each) for each in (budget, near))
        return self._history[near].drafted_s * read / read_near

    def _over_link_s(self, needs: TextNeeds, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds that the prompt's KV takes over the link."""
        if self.link_rate is None:
            return 0.0
        return link_bytes(needs, plan, prompt) / self.link_rate


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
