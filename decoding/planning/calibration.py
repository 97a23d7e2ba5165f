"""The correction of predicted round costs by the measured rounds of past requests.

A request's mode and budget depend on past requests only, never on the request itself, so its output
distribution is the same with any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from decoding.config.defaults import (
    COMPUTE_BOUND_RATIO,
    HISTORY_DECAY,
    MIN_ROUNDS,
    MIN_TESTED,
    OWN_HISTORY_TOKENS,
    PRIOR_TOKENS,
)
from decoding.planning.plan import Plan
from decoding.planning.requirements import Strategy
from decoding.planning.round_cost import RoundCost, rejection_ratio, retrieval_rejection_ratio
from decoding.speculation.draft_length import RoundStats


@dataclass
class StrategyHistory:
    """What past requests with one strategy measured."""

    tested: float = 0.0  # draft tokens
    rejected: float = 0.0
    # tokens that would give as many rejections with DEFAULT_RETRIEVAL_BUDGET
    default_tested: float = 0.0
    drafting: float = 1.0  # measured seconds per draft token, relative to predicted ones


@dataclass(frozen=True)
class Verification:
    """What the last request in one mode measured of its verifications."""

    compute: float = 1.0  # measured seconds of compute, relative to predicted ones
    other_s: float = 0.0  # explained by neither link nor compute


class Calibration:
    """Ratios of measured to predicted seconds, and measured rejections, of past requests."""

    def __init__(self) -> None:
        self._history: dict[Strategy, StrategyHistory] = {}
        # measurements of the last request in each mode, oldest first
        self._verifications: dict[str, Verification] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no request has been measured yet."""
        return not self._history

    def record_rejections(self, plan: Plan, rounds: Sequence[RoundStats]) -> bool:
        """Record the draft tokens of a finished request; return whether they are informative.

        Those of a prompt within the retrieval budget are not: they are drafted with the target's
        whole cache, and predict nothing for longer prompts.
        """
        drafted = [stats for stats in rounds if stats.drafted]
        rejected = sum(stats.accepted < stats.drafted for stats in drafted)
        tested = sum(stats.accepted for stats in drafted) + rejected
        strategy = plan.requirements.strategy
        is_whole = plan.requirements.may_retrieve and plan.spec.prompt <= strategy.budget
        if len(drafted) < MIN_ROUNDS or tested < MIN_TESTED or is_whole:
            return False
        drafting = self._closest(strategy).drafting
        past = self._history.setdefault(strategy, StrategyHistory(drafting=drafting))
        past.tested = HISTORY_DECAY * past.tested + tested
        past.rejected = HISTORY_DECAY * past.rejected + rejected
        past.default_tested *= HISTORY_DECAY
        past.default_tested += tested * rejection_ratio(plan)
        return True

    def record_seconds(
        self, plan: Plan, predicted: RoundCost, rounds: Sequence[RoundStats]
    ) -> None:
        """Record the seconds of an informative request, given its predicted cost.

        A verification that takes much longer than the link is bound by compute. Of one that does
        not, the compute is only known to have been hidden.
        """
        strategy = plan.requirements.strategy
        drafted = [stats for stats in rounds if stats.drafted]
        drafted_s = median_high(stats.draft_s / stats.drafted for stats in drafted)
        if predicted.drafted_s:
            self._history[strategy].drafting = drafted_s / predicted.drafted_s
        whole_s = median_high(stats.verify_s for stats in drafted)
        compute_s = predicted.compute_s(median_high(stats.drafted for stats in drafted))
        ratio = max(0.0, whole_s - predicted.uncovered_s) / compute_s
        other_s = 0.0
        if whole_s <= COMPUTE_BOUND_RATIO * predicted.link_s:
            ratio = min(ratio, self._verification(strategy.mode).compute)
            hidden_s = ratio * compute_s + predicted.uncovered_s
            other_s = max(0.0, whole_s - max(predicted.link_s, hidden_s))
        self._verifications.pop(strategy.mode, None)
        self._verifications[strategy.mode] = Verification(ratio, other_s)

    def scaled(self, plan: Plan, predicted: RoundCost) -> RoundCost:
        """Return the cost of a round, corrected by past requests; their acceptance is in it."""
        strategy = plan.requirements.strategy
        verification = self._verification(strategy.mode)
        return replace(
            predicted,
            compute_s=lambda drafted: verification.compute * predicted.compute_s(drafted),
            drafted_s=self._closest(strategy).drafting * predicted.drafted_s,
            other_s=verification.other_s,
        )

    def rejection(self, plan: Plan, prior: float) -> float:
        """Return the probability that a draft token is rejected if all before it are accepted.

        It follows from all past requests, weighted towards those with this strategy. `prior` is the
        assumption without any.
        """
        expected = self._expected(rejection_ratio(plan), prior)
        own = self._history.get(plan.requirements.strategy, StrategyHistory())
        return (own.rejected + OWN_HISTORY_TOKENS * expected) / (own.tested + OWN_HISTORY_TOKENS)

    def retrieval_rejection(self, budget: int, prior: float) -> float:
        """Return the same for tokens drafted on a retrieval cache, at the level above it."""
        return self._expected(retrieval_rejection_ratio(budget), prior)

    def _expected(self, ratio: float, prior: float) -> float:
        """Return a rejection rate, given its ratio to that with DEFAULT_RETRIEVAL_BUDGET."""
        rejected = sum(past.rejected for past in self._history.values())
        tested = sum(past.default_tested for past in self._history.values())
        return min(1.0, (PRIOR_TOKENS * prior + ratio * rejected) / (PRIOR_TOKENS + tested))

    def _verification(self, mode: str) -> Verification:
        """Return what the last request in a mode measured, or in any mode if there was none."""
        last = next(reversed(self._verifications.values()), Verification())
        return self._verifications.get(mode, last)

    def _closest(self, strategy: Strategy) -> StrategyHistory:
        """Return the history of the closest budget, in the same mode if there is one."""
        if self.is_empty:
            return StrategyHistory()
        same_mode = [past for past in self._history if past.mode == strategy.mode]
        closest = min(
            same_mode or self._history,
            key=lambda past: (
                max(past.budget, strategy.budget) / min(past.budget, strategy.budget),
                past.budget,
            ),
        )
        return self._history[closest]
