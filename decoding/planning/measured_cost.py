"""Round costs measured on past requests.

Link time follows from bytes and the link rate. Rejection rates and the times of drafting and
verification come from past requests only. A request's strategy therefore never depends on the
request itself, and its output distribution is the same with any strategy.
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
    """Statistics of the past requests that used one strategy."""

    tested: float = 0.0  # tokens
    rejected: float = 0.0
    # tokens that would give as many rejections with DEFAULT_RETRIEVAL_BUDGET
    default_tested: float = 0.0
    drafted_s: float = 0.0  # per draft token
    read_bytes: float = 1.0  # per forward of the level below the target


@dataclass(frozen=True)
class Verification:
    """The median verification of a request, in seconds."""

    whole_s: float
    link_s: float  # the transfer alone


class MeasuredCosts:
    """Round costs from the timings of past requests and the link rate."""

    def __init__(self, link_rate: float | None):
        """Start without history. `link_rate`: bytes/s; None if nothing is copied."""
        self.link_rate = link_rate
        self._history: dict[Strategy, StrategyHistory] = {}
        # the last request of each mode, oldest first
        self._verifications: dict[str, Verification] = {}

    def record(
        self,
        requirements: Requirements,
        plan: MemoryPlan,
        prompt: int,
        rounds: Sequence[RoundStats],
    ) -> bool:
        """Record a finished request; return whether it was informative.

        A prompt within the retrieval budget is not: it is drafted with the target's whole cache,
        and predicts nothing for longer prompts.
        """
        drafted = [stats for stats in rounds if stats.drafted]
        rejected = sum(stats.accepted < stats.drafted for stats in drafted)
        tested = sum(stats.accepted for stats in drafted) + rejected
        if len(drafted) < MIN_ROUNDS or tested < MIN_TESTED or prompt <= requirements.budget:
            return False
        past = self._history.setdefault(requirements.strategy, StrategyHistory())
        past.tested = HISTORY_DECAY * past.tested + tested
        past.rejected = HISTORY_DECAY * past.rejected + rejected
        past.default_tested *= HISTORY_DECAY
        past.default_tested += tested * rejection_ratio(requirements, plan)
        past.drafted_s = median_high(stats.draft_s / stats.drafted for stats in drafted)
        past.read_bytes = _draft_read_bytes(requirements, plan, prompt)
        self._verifications.pop(requirements.mode, None)
        self._verifications[requirements.mode] = Verification(
            median_high(stats.verify_s for stats in drafted),
            self._link_s(requirements, plan, prompt),
        )
        return True

    def round_cost(
        self, requirements: Requirements, plan: MemoryPlan, prompt: int
    ) -> RoundCost | None:
        if not self._history:
            return None
        # Compute is assumed to be hidden by the transfer, unless it clearly dominates.
        last = list(self._verifications.values())[-1]
        measured = self._verifications.get(requirements.mode, last)
        compute_bound = measured.whole_s > COMPUTE_BOUND_RATIO * measured.link_s
        compute = measured.whole_s if compute_bound else 0.0
        return RoundCost(
            link_s=self._link_s(requirements, plan, prompt),
            compute_s=lambda drafted: compute,
            drafted_s=self._drafted_s(requirements, plan, prompt),
            acceptance=1 - self.rejection(requirements, plan),
            other_s=max(0.0, measured.whole_s - max(measured.link_s, compute)),
        )

    def rejection(self, requirements: Requirements, plan: MemoryPlan) -> float:
        """Return the probability that a draft token is rejected if all before it are accepted.

        It follows from all past requests, weighted towards those with this strategy.
        """
        expected = min(1.0, self._default_rejection() * rejection_ratio(requirements, plan))
        own = self._history.get(requirements.strategy, StrategyHistory())
        return (own.rejected + OWN_HISTORY_TOKENS * expected) / (own.tested + OWN_HISTORY_TOKENS)

    def _default_rejection(self) -> float:
        """Return the rejection rate with DEFAULT_RETRIEVAL_BUDGET, from all past requests."""
        rejected = sum(past.rejected for past in self._history.values())
        tested = sum(past.default_tested for past in self._history.values())
        return (PRIOR_REJECTION * PRIOR_TOKENS + rejected) / (PRIOR_TOKENS + tested)

    def _drafted_s(self, requirements: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds per draft token.

        Times of a new strategy are scaled from the closest past one, by the bytes that a forward
        of the level below the target reads.
        """
        budget = requirements.budget
        same_mode = [strategy for strategy in self._history if strategy.mode == requirements.mode]
        closest = min(
            same_mode or self._history,
            key=lambda strategy: (
                max(strategy.budget, budget) / min(strategy.budget, budget),
                strategy.budget,
            ),
        )
        past = self._history[closest]
        read_bytes = _draft_read_bytes(requirements, plan, prompt)
        forward_s = past.drafted_s * read_bytes / past.read_bytes
        if not requirements.has_split or same_mode:
            return forward_s
        # The levels below the target now draft for the split level.
        rejection = self._default_rejection() * retrieval_rejection_ratio(closest.budget)
        _, drafted_s = best_length(
            requirements.inner_lengths,
            1 - min(1.0, rejection),
            lambda n: forward_s + n * past.drafted_s,
        )
        return drafted_s

    def _link_s(self, requirements: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds of the prompt's KV transfer."""
        if self.link_rate is None:
            return 0.0
        return link_bytes(requirements, plan, prompt) / self.link_rate


def _draft_read_bytes(requirements: Requirements, plan: MemoryPlan, prompt: int) -> float:
    """Return the bytes, weights and KV, that a forward of the level below the target reads."""
    tokens: float = requirements.budget
    if requirements.has_split:
        tokens = requirements.effective_device_tokens(plan, prompt, HIGH_BYTE_SHARE)
    weights = weight_bytes(requirements.target, requirements.ranks, requirements.dtype)
    return weights + requirements.layout.bytes(round(tokens))
