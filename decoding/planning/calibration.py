"""The correction of predicted round costs by the measured rounds of past requests.

A request's mode and budget depend on past requests only, never on the request itself, so its output
distribution is the same with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median_high

from decoding.config.defaults import (
    HISTORY_DECAY,
    MIN_ROUNDS,
    MIN_TESTED,
    OWN_HISTORY_TOKENS,
    PRIOR_TOKENS,
    UNUSED_DRIFT,
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
    drafting: float | None = None  # measured seconds per draft token, relative to predicted ones


@dataclass(frozen=True)
class Verification:
    """Measured seconds of verifications in one mode, relative to predicted ones."""

    link: float = 1.0
    compute: float = 1.0

    def blend(self, other: Verification, weight: float) -> Verification:
        """Return the mean of both, `other` with this weight."""
        return Verification(
            _blend(self.link, other.link, weight), _blend(self.compute, other.compute, weight)
        )


class Calibration:
    """Ratios of measured to predicted seconds, and measured rejections, of past requests.

    A new ratio counts as much as all older ones of the same strategy. Those of other strategies
    drift towards it, so that one whose requests were slow for another reason is tried again.
    """

    def __init__(self) -> None:
        self._history: dict[Strategy, StrategyHistory] = {}
        # measurements by mode, that of the last request at the end
        self._verifications: dict[str, Verification] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no request has been measured yet."""
        return not self._history

    def record(
        self, plan: Plan, rounds: Sequence[RoundStats], predict: Callable[[Plan], RoundCost]
    ) -> bool:
        """Record the rounds of a finished request; return whether they are informative.

        Those of a prompt within the retrieval budget are not: they are drafted with the target's
        whole cache, and predict nothing for longer prompts. `predict` returns the profile's cost.
        """
        drafted = [stats for stats in rounds if stats.drafted]
        rejected = sum(stats.accepted < stats.drafted for stats in drafted)
        tested = sum(stats.accepted for stats in drafted) + rejected
        strategy = plan.requirements.strategy
        is_whole = plan.requirements.may_retrieve and plan.spec.prompt <= strategy.budget
        if len(drafted) < MIN_ROUNDS or tested < MIN_TESTED or is_whole:
            return False
        past = self._history.setdefault(strategy, StrategyHistory())
        past.tested = HISTORY_DECAY * past.tested + tested
        past.rejected = HISTORY_DECAY * past.rejected + rejected
        past.default_tested *= HISTORY_DECAY
        past.default_tested += tested * rejection_ratio(plan)
        predicted = predict(plan)
        timed = [stats for stats in drafted if stats.timed]
        if predicted.drafted_s and timed:
            drafted_s = median_high(stats.draft_s / stats.timed for stats in timed)
            self._record_drafting(strategy, drafted_s / predicted.drafted_s)
        whole_s = median_high(stats.verify_s for stats in drafted)
        drafting_s = median_high(stats.draft_s for stats in drafted)
        length = median_high(stats.drafted for stats in drafted)
        link = predicted.link_ratio(whole_s, drafting_s) if predicted.link_s else None
        compute = predicted.compute_ratio(length, whole_s, drafting_s)
        self._record_verification(strategy.mode, link, compute)
        return True

    def scaled(self, plan: Plan, predicted: RoundCost) -> RoundCost:
        """Return the cost of a round with corrected seconds."""
        ratios = self._verification(plan.requirements.mode)
        return replace(
            predicted,
            link_s=ratios.link * predicted.link_s,
            ahead_s=ratios.link * predicted.ahead_s,
            compute_s=lambda drafted: ratios.compute * predicted.compute_s(drafted),
            drafted_s=self.drafting(plan) * predicted.drafted_s,
        )

    def drafting(self, plan: Plan) -> float:
        """Return the ratio of the seconds of drafting: that of the closest measured budgets.

        It is of the same mode if that has been measured.
        """
        strategy = plan.requirements.strategy
        measured = {key: past.drafting for key, past in self._history.items() if past.drafting}
        same_mode = [key for key in measured if key.mode == strategy.mode]
        closest = min(
            same_mode or measured,
            key=lambda past: (
                max(past.budget, strategy.budget) / min(past.budget, strategy.budget),
                past.budget,
                abs(past.split_budget - strategy.split_budget),
            ),
            default=None,
        )
        return measured[closest] if closest is not None else 1.0

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

    def _record_drafting(self, strategy: Strategy, ratio: float) -> None:
        for key, past in self._history.items():
            if key == strategy:
                past.drafting = _blend(past.drafting or ratio, ratio, 1 - HISTORY_DECAY)
            elif past.drafting is not None:
                past.drafting = _blend(past.drafting, ratio, UNUSED_DRIFT)

    def _record_verification(self, mode: str, link: float | None, compute: float) -> None:
        """Record the factors of the link's and of the compute's seconds that explain verifications.

        The one that needs the smaller correction does: the other one took no longer. `link` is None
        if nothing is transferred.
        """
        past = self._verification(mode)
        if link is None:
            measured = Verification(past.link, compute)
        elif _distance(link, past.link) <= _distance(compute, past.compute):
            measured = Verification(link, min(past.compute, compute))
        else:
            measured = Verification(min(past.link, link), compute)
        for other, ratios in self._verifications.items():
            self._verifications[other] = ratios.blend(measured, UNUSED_DRIFT)
        own = past.blend(measured, 1 - HISTORY_DECAY) if mode in self._verifications else measured
        self._verifications.pop(mode, None)
        self._verifications[mode] = own

    def _verification(self, mode: str) -> Verification:
        """Return the ratios of a mode, or of the last measured one if it was not measured."""
        last = next(reversed(self._verifications.values()), Verification())
        return self._verifications.get(mode, last)


def _blend(past: float, measured: float, weight: float) -> float:
    return past + weight * (measured - past)


def _distance(ratio: float, other: float) -> float:
    """Return how far apart two ratios are, as the logarithm of a factor."""
    return abs(log(max(ratio, 1e-9) / max(other, 1e-9)))
