"""The seconds and the yield of one decoding round.

time per token = (max(link, compute) of a verification + drafting) / tokens per verification

While it is drafted, the transfer ring fills; while it waits for the link, the next one is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decoding.config.defaults import (
    ACCEPTANCE,
    DEFAULT_RETRIEVAL_BUDGET,
    EXACT_KEYS_REJECTION,
    INNER_ACCEPTANCE,
    REJECTION_EXPONENT,
    SPLIT_BUDGET_EXPONENT,
    SPLIT_REJECTION,
    UNCOVERED_EXPONENT,
)
from decoding.planning.plan import Plan, split_tokens
from decoding.speculation.draft_length import best_length, expected_tokens, timed_tokens


@dataclass(frozen=True)
class RoundCost:
    """The seconds of one decoding round, as a function of the number of draft tokens."""

    link_s: float  # transfer of the host layers' KV
    compute_s: Callable[[int], float]  # verification compute, by number of draft tokens
    drafted_s: float  # per draft token
    acceptance: float  # probability that a draft token is accepted if all before it are
    # the first slot's copy, which compute-bound verifications without a draft cannot hide
    uncovered_s: float = 0.0
    ahead_s: float = 0.0  # transfer of what the ring holds: as much as a draft may hide
    max_ahead: int = 0  # tokens that may be drafted during a verification

    def verification_s(self, drafted: int) -> float:
        """Return the seconds of a verification."""
        return max(self._verification(drafted))

    def verification_bound(self, drafted: int) -> str:
        """Return what bounds a verification: link or compute."""
        link, compute = self._verification(drafted)
        return "link" if link >= compute else "compute"

    def drafting_s(self, drafted: int) -> float:
        """Return the seconds of a draft, but for those during the verification before it."""
        if not self.drafted_s:
            return 0.0
        wait_s = max(0.0, self.link_s - self.ahead_s - self.compute_s(drafted))
        meanwhile = min(self.max_ahead, wait_s / self.drafted_s)
        return timed_tokens(drafted, self.acceptance, meanwhile) * self.drafted_s

    def link_ratio(self, verification_s: float, drafting_s: float) -> float:
        """Return the factor of the link's seconds that explains a link-bound verification.

        `drafting_s`: of the draft before it.
        """
        rest = self.link_s - self.ahead_s
        if rest > 0 and verification_s / rest * self.ahead_s <= drafting_s:
            return verification_s / rest
        return (verification_s + drafting_s) / self.link_s

    def compute_ratio(self, drafted: int, verification_s: float, drafting_s: float) -> float:
        """Return the factor of the compute's seconds that explains a compute-bound verification."""
        uncovered = max(0.0, self.uncovered_s - drafting_s)
        return max(0.0, verification_s - uncovered) / self.compute_s(drafted)

    def _verification(self, drafted: int) -> tuple[float, float]:
        """Return the seconds of a verification's transfers, and those of its compute."""
        drafting_s = drafted * self.drafted_s
        link = self.link_s - min(self.ahead_s, drafting_s)
        return link, self.compute_s(drafted) + max(0.0, self.uncovered_s - drafting_s)

    def tokens(self, drafted: int) -> float:
        """Return the expected number of tokens per round."""
        return expected_tokens(self.acceptance, drafted)

    def best_length(self, lengths: Iterable[int]) -> tuple[int, float]:
        """Return the draft length with the fewest seconds per token, and those seconds."""
        return best_length(
            lengths, self.acceptance, lambda n: self.verification_s(n) + self.drafting_s(n)
        )


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates of draft tokens: by the target, and by the level below it."""

    target: float = ACCEPTANCE  # proposals of a retrieval cache or of prompt lookup
    inner: float = INNER_ACCEPTANCE  # proposals of a draft model, to any level
    budget: int = DEFAULT_RETRIEVAL_BUDGET  # the retrieval budget `target` refers to
    # Whether all levels share the noise of a position (`deterministic`). `target` and `inner` are
    # rates with independent noise.
    is_coupled: bool = False

    def rate(self, plan: Plan) -> float:
        """Return the target's acceptance rate with a plan's budget and split layers."""
        needs = plan.requirements
        if not needs.may_retrieve:
            return self.draft_rate if needs.has_draft else self._coupled(1 - self.target)
        return self._coupled(self._default_rejection * rejection_ratio(plan))

    def retrieval_rate(self, budget: int) -> float:
        """Return the acceptance rate of tokens drafted on a retrieval cache of this budget."""
        return self._coupled(self._default_rejection * retrieval_rejection_ratio(budget))

    @property
    def draft_rate(self) -> float:
        """Return the acceptance rate of a draft model's tokens by the level above it."""
        return self._coupled(1 - self.inner)

    def _coupled(self, rejection: float) -> float:
        """Return the acceptance rate, given the rejection rate with independent noise.

        Noise shared by all levels raises a rejection rate r to at most 2r / (1 + r), and this upper
        bound is used (Daliri, Musco and Suresh, arXiv 2408.07978). Greedy decoding has no noise, so
        its rate does not change.
        """
        rejection = min(1.0, rejection)
        return 1 - (2 * rejection / (1 + rejection) if self.is_coupled else rejection)

    @property
    def _default_rejection(self) -> float:
        """Return the rejection rate with DEFAULT_RETRIEVAL_BUDGET."""
        return (1 - self.target) / retrieval_rejection_ratio(self.budget)


def retrieval_rejection_ratio(budget: int) -> float:
    """Return the rejection rate of a retrieval budget relative to DEFAULT_RETRIEVAL_BUDGET.

    It falls with a power of the budget (docs/memory.md).
    """
    return (budget / DEFAULT_RETRIEVAL_BUDGET) ** -REJECTION_EXPONENT


def selected_rejection_ratio(share: float) -> float:
    """Return the rejection rate with exact keys of a share of the tokens, relative to none."""
    return min(1.0, EXACT_KEYS_REJECTION * share**-SPLIT_BUDGET_EXPONENT) if share else 1.0


def rejection_ratio(plan: Plan) -> float:
    """Return the target's rejection rate relative to the default budget without split layers."""
    needs, memory = plan.requirements, plan.memory
    if not needs.may_retrieve:
        return 1.0
    retrieval = retrieval_rejection_ratio(needs.strategy.budget)
    if not needs.has_split:
        return retrieval
    layers = max(1, needs.target.full_layers)
    split = SPLIT_REJECTION * memory.split_layers / layers
    split *= selected_rejection_ratio(split_tokens(plan) / plan.spec.prompt)
    uncovered = (layers - memory.resident_layers - memory.split_layers) / layers
    return split + max(0.0, retrieval - split) * uncovered**UNCOVERED_EXPONENT
