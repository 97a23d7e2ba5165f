"""What past texts showed of the cost of a round.

Link time follows from bytes and the link's rate. Rejections, and the seconds of drafting and of
verifying, are those of past texts: a text's mode and budget then depend on texts before it alone,
and its output law is what it would be with any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from decoding.config.defaults import (
    COMPUTE_BOUND_RATIO,
    HIGH_BYTE_SHARE,
    HISTORY_DECAY,
    MIN_ROUNDS,
    MIN_TESTED,
    OWN_HISTORY_TOKENS,
    PRIOR_REJECTION,
    PRIOR_TOKENS,
)
from decoding.planning.cost import RoundCost, link_bytes, rejection_ratio, retrieval_rejection_ratio
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Requirements, Strategy, weight_bytes
from decoding.speculation.draft_length import RoundStats, best_length


@dataclass
class StrategyHistory:
    """What texts that were drafted for in one way showed."""

    tested: float = 0.0  # tokens
    rejected: float = 0.0
    usual: float = (
        0.0  # tokens, as if tested with DEFAULT_RETRIEVAL_BUDGET: so many as reject as often
    )
    drafted_s: float = 0.0  # of a drafted token
    read: float = 1.0  # bytes that a pass of the level below the target reads


@dataclass(frozen=True)
class Verification:
    """What the verifications of a text took, in seconds."""

    whole_s: float
    link_s: float  # the link's part of it


class MeasuredCosts:
    """The costs of rounds by what past texts showed, and by the rate of the link."""

    def __init__(self, link_rate: float | None):
        """Begin without texts. `link_rate`: bytes a second; None where nothing is copied."""
        self.link_rate = link_rate
        self._history: dict[Strategy, StrategyHistory] = {}
        self._verifications: dict[str, Verification] = {}  # of each mode's last text, oldest first

    def record(
        self, needs: Requirements, plan: MemoryPlan, prompt: int, rounds: Sequence[RoundStats]
    ) -> bool:
        """Take in a text that is over; return whether it said anything.

        One that its budget held whole says nothing of longer texts: its proposals are the target's
        own.
        """
        drafted = [each for each in rounds if each.drafted]
        rejected = sum(each.accepted < each.drafted for each in drafted)
        tested = sum(each.accepted for each in drafted) + rejected
        if len(drafted) < MIN_ROUNDS or tested < MIN_TESTED or prompt <= needs.budget:
            return False
        past = self._history.setdefault(needs.strategy, StrategyHistory())
        past.tested = HISTORY_DECAY * past.tested + tested
        past.rejected = HISTORY_DECAY * past.rejected + rejected
        past.usual = HISTORY_DECAY * past.usual + tested * rejection_ratio(needs, plan)
        past.drafted_s = median_high(each.draft_s / each.drafted for each in drafted)
        past.read = _read_below(needs, plan, prompt)
        self._verifications.pop(needs.mode, None)
        self._verifications[needs.mode] = Verification(
            median_high(each.verify_s for each in drafted), self._over_link_s(needs, plan, prompt)
        )
        return True

    def round_cost(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> RoundCost | None:
        if not self._history:
            return None
        # compute is hidden behind the link, as far as is known, unless it is plainly the cost
        last = list(self._verifications.values())[-1]
        seen = self._verifications.get(needs.mode, last)
        bound_by_compute = seen.whole_s > COMPUTE_BOUND_RATIO * seen.link_s
        compute = seen.whole_s if bound_by_compute else 0.0
        return RoundCost(
            link_s=self._over_link_s(needs, plan, prompt),
            compute_s=lambda drafted: compute,
            drafted_s=self._drafted_s(needs, plan, prompt),
            acceptance=1 - self.rejection(needs, plan),
            other_s=max(0.0, seen.whole_s - max(seen.link_s, compute)),
        )

    def rejection(self, needs: Requirements, plan: MemoryPlan) -> float:
        """Return how often a drafted token is rejected when all before it stand.

        All texts have a say, those with this mode and budget more than others.
        """
        expected = min(1.0, self._usual_rejection() * rejection_ratio(needs, plan))
        own = self._history.get(needs.strategy, StrategyHistory())
        return (own.rejected + OWN_HISTORY_TOKENS * expected) / (own.tested + OWN_HISTORY_TOKENS)

    def _usual_rejection(self) -> float:
        """Return how often tokens would be rejected with DEFAULT_RETRIEVAL_BUDGET, by all texts."""
        rejected = sum(past.rejected for past in self._history.values())
        tested = sum(past.usual for past in self._history.values())
        return (PRIOR_REJECTION * PRIOR_TOKENS + rejected) / (PRIOR_TOKENS + tested)

    def _drafted_s(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds of a drafted token.

        Those of a way not seen follow from the nearest that was, by what a pass of the level below
        the target reads.
        """
        budget = needs.budget
        alike = [way for way in self._history if way.mode == needs.mode]
        near = min(
            alike or self._history,
            key=lambda way: (max(way.budget, budget) / min(way.budget, budget), way.budget),
        )
        past = self._history[near]
        pass_s = past.drafted_s * _read_below(needs, plan, prompt) / past.read
        if not needs.has_split or alike:
            return pass_s
        # what was drafted without codes is now put before them
        usual = self._usual_rejection() * retrieval_rejection_ratio(near.budget)
        _, drafted_s = best_length(
            needs.inner_lengths,
            1 - min(1.0, usual),
            lambda n: pass_s + n * past.drafted_s,
        )
        return drafted_s

    def _over_link_s(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds that the prompt's KV takes over the link."""
        if self.link_rate is None:
            return 0.0
        return link_bytes(needs, plan, prompt) / self.link_rate


def _read_below(needs: Requirements, plan: MemoryPlan, prompt: int) -> float:
    """Return the bytes that a pass of the level below the target reads: weights and KV."""
    tokens: float = needs.budget
    if needs.has_split:
        tokens = needs.effective_device_tokens(plan, prompt, HIGH_BYTE_SHARE)
    weights = weight_bytes(needs.target, needs.ranks, needs.dtype)
    return weights + needs.layout.bytes(round(tokens))
