"""What a round of decoding costs: one model, fed by a machine's numbers or by past rounds.

    time per token = (max(link, compute) of a verification + drafting) / tokens per verification

A cost is as good as its numbers: rates of the hardware (`profiles.json` says where each is from),
or what rounds of other texts took, and acceptance, which depends on models and text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decoding.config.defaults import (
    ACCEPTANCE,
    DEFAULT_RETRIEVAL_BUDGET,
    HIGH_BYTE_SHARE,
    INNER_ACCEPTANCE,
    INNER_DRAFT,
    RECONSTRUCTION_TRAFFIC,
    REJECTION_EXPONENT,
    SPLIT_REJECTION,
    UNCOVERED_EXPONENT,
)
from decoding.planning.forward_cost import ForwardCost, selection_s, target_cost
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Requirements
from decoding.speculation.draft_length import RoundStats, best_length, expected_tokens
from offload.retrieval.policy_specs import POLICY_SPECS


@dataclass(frozen=True)
class RoundCost:
    """The seconds of one round of a text, by the number of tokens that are drafted in it."""

    link_s: float  # the KV of the layers on the host, over the link
    compute_s: Callable[[int], float]  # a verification of so many drafted tokens, beside the link
    drafted_s: float  # a drafted token
    acceptance: float  # how often a drafted token stands when all before it do
    uncovered_s: float = 0.0  # copies that no compute hides where compute is the cost
    other_s: float = 0.0  # of a verification, what neither link nor compute explains

    def verification_s(self, drafted: int) -> float:
        """Return the seconds of a verification."""
        return max(self.link_s, self.compute_s(drafted) + self.uncovered_s) + self.other_s

    def verification_bound(self, drafted: int) -> str:
        """Return what a verification waits for."""
        compute = self.compute_s(drafted) + self.uncovered_s
        return "link" if self.link_s >= compute else "compute"

    def tokens(self, drafted: int) -> float:
        """Return the tokens that a round is expected to yield."""
        return expected_tokens(self.acceptance, drafted)

    def best_length(self, lengths: Iterable[int]) -> tuple[int, float]:
        """Return the draft length with the fewest seconds a token, and these seconds."""
        return best_length(
            lengths, self.acceptance, lambda n: self.verification_s(n) + n * self.drafted_s
        )


class CostSource(Protocol):
    """Whoever can tell what a round of a text would cost."""

    def round_cost(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> RoundCost | None:
        """Return the cost with mode and budget of `needs`; None where nothing is known of it."""

    def record(
        self, needs: Requirements, plan: MemoryPlan, prompt: int, rounds: Sequence[RoundStats]
    ) -> bool:
        """Take in a text that is over; return whether it said anything."""


def link_bytes(needs: Requirements, plan: MemoryPlan, prompt: int) -> int:
    """Return the bytes of KV that a verification brings over one rank's link."""
    return needs.planned_spec(plan, prompt).streamed_bytes(prompt)


@dataclass(frozen=True)
class Acceptance:
    """How often a drafted token stands: before the target, and before the level below it."""

    target: float = ACCEPTANCE  # of what a retrieval cache or a lookup proposes
    inner: float = INNER_ACCEPTANCE  # of what a draft model proposes, to whichever level
    budget: int = DEFAULT_RETRIEVAL_BUDGET  # the retrieval budget that the target's rate is of
    # whether a position's noise is every level's (`deterministic`), which these rates are not of
    is_coupled: bool = False

    def of(self, needs: Requirements, plan: MemoryPlan) -> float:
        """Return the target's rate with the budget of these needs, and the codes of this plan."""
        if not needs.may_retrieve:
            return self.drafted if needs.has_draft else self._accepted(1 - self.target)
        return self._accepted(self._rejected * rejection_ratio(needs, plan))

    def retrieved(self, needs: Requirements) -> float:
        """Return the rate of tokens that come from a retrieval cache of these needs' budget."""
        return self._accepted(self._rejected * retrieval_rejection_ratio(needs.budget))

    @property
    def drafted(self) -> float:
        """Return the rate of tokens that a draft model puts before the level above it."""
        return self._accepted(1 - self.inner)

    def _accepted(self, rejected: float) -> float:
        """Return how often tokens stand that independent noise would reject so often.

        With noise that all levels share, a token that would be rejected with probability r is
        rejected with 2r / (1 + r) at most, which is what is taken here (Daliri, Musco and Suresh,
        arXiv 2408.07978). Greedy texts have no noise, and reject as before.
        """
        rejected = min(1.0, rejected)
        return 1 - (2 * rejected / (1 + rejected) if self.is_coupled else rejected)

    @property
    def _rejected(self) -> float:
        """Return how often tokens are rejected with DEFAULT_RETRIEVAL_BUDGET."""
        return (1 - self.target) / retrieval_rejection_ratio(self.budget)


def retrieval_rejection_ratio(budget: int) -> float:
    """Return rejections with a retrieval budget, as a multiple of those with DEFAULT_RETRIEVAL_BUDGET.

    They fall with a power of the budget (docs/memory.md).
    """
    return (budget / DEFAULT_RETRIEVAL_BUDGET) ** -REJECTION_EXPONENT


def rejection_ratio(needs: Requirements, plan: MemoryPlan) -> float:
    """Return rejections before the target, as a multiple of those with DEFAULT_RETRIEVAL_BUDGET alone."""
    retrieved = retrieval_rejection_ratio(needs.budget)
    if not needs.has_split:
        return retrieved
    layers = needs.target.layers
    coded = SPLIT_REJECTION * plan.split_layers / layers
    uncovered = (layers - plan.resident_layers - plan.split_layers) / layers
    return coded + max(0.0, retrieved - coded) * uncovered**UNCOVERED_EXPONENT


class PredictedCosts:
    """The costs of rounds by a machine's numbers, of one text or of several that share passes."""

    def __init__(self, hardware: HardwareProfile, acceptance: Acceptance, texts: int = 1):
        self.hardware, self.acceptance, self.texts = hardware, acceptance, texts

    def round_cost(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> RoundCost:
        return RoundCost(
            link_s=self.texts * link_bytes(needs, plan, prompt) / self.hardware.link_in,
            compute_s=lambda drafted: (
                self._verification_s(needs, drafted + 1, prompt)
                + self.texts * self._reconstruction_s(needs, plan, prompt)
                + self.texts * self._selecting_s(needs, plan, prompt, drafted)
            ),
            drafted_s=self._drafted_s(needs, plan, prompt),
            acceptance=self.acceptance.of(needs, plan),
            uncovered_s=self._first_copy_s(needs, plan, prompt),
        )

    def record(
        self, needs: Requirements, plan: MemoryPlan, prompt: int, rounds: Sequence[RoundStats]
    ) -> bool:
        return False  # a machine's numbers stay what they are

    def retrieval_s(self, needs: Requirements, prompt: int) -> float:
        """Return the seconds of a pass over the retrieval cache."""
        if not needs.has_retrieval:
            return 0.0
        drafted = self._inner_draft(needs) if self._drafts(needs) else 0
        read = self.hardware.int8_share if needs.int8_retrieval else 1.0
        budget = min(needs.budget, prompt)
        return target_cost(self.hardware, needs).seconds(drafted + 1, budget, self.texts, read)

    def draft_s(self, needs: Requirements) -> float:
        """Return the seconds of a pass of the draft model."""
        if needs.draft is None or not needs.has_draft:
            return 0.0
        passes = ForwardCost(self.hardware, needs.draft, needs.draft_ranks, needs.dtype)
        return passes.seconds(1, needs.window, self.texts)

    def on_device_s(self, needs: Requirements, plan: MemoryPlan, prompt: int, rows: int) -> float:
        """Return the seconds of a pass over what the device has of the target's cache."""
        hardware = self.hardware
        kv_rate = hardware.kv_rate or hardware.memory_rate
        code = kv_rate / (hardware.high_bits_rate or kv_rate / HIGH_BYTE_SHARE)
        attended = round(needs.effective_device_tokens(plan, prompt, code))
        return target_cost(hardware, needs).seconds(rows, attended, self.texts)

    def _verification_s(self, needs: Requirements, rows: int, prompt: int) -> float:
        """Return the seconds of a pass over all of the target's cache."""
        passes = target_cost(self.hardware, needs)
        if needs.settings.deterministic:
            return passes.batch_invariant_seconds(rows, prompt)
        return passes.seconds(rows, prompt, self.texts)

    def _drafted_s(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds of a token put before the target."""
        retrieval, draft = self.retrieval_s(needs, prompt), self.draft_s(needs)
        token_s = draft
        if needs.has_retrieval:
            token_s = retrieval
            if draft:
                inner = self._inner_draft(needs)
                tokens = expected_tokens(self.acceptance.drafted, inner)
                token_s = (retrieval + inner * draft) / tokens
        if not needs.has_split:
            return token_s
        if not token_s:
            return self.on_device_s(needs, plan, prompt, 1)
        acceptance = self.acceptance
        stands = acceptance.retrieved(needs) if needs.has_retrieval else acceptance.drafted
        _, drafted_s = best_length(
            needs.inner_lengths,
            stands,
            lambda n: self.on_device_s(needs, plan, prompt, n + 1) + n * token_s,
        )
        return drafted_s

    def _reconstruction_s(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds that a verification takes to join slices."""
        shape = needs.planned_spec(plan, prompt)
        rate = self.hardware.reconstruct_rate or self.hardware.memory_rate / RECONSTRUCTION_TRAFFIC
        return needs.layout.bytes(prompt, shape.split_or_compressed_layers) / rate

    def _first_copy_s(self, needs: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds of the first slot's copy, where no layer computes before it.

        Where the link is the cost, it is part of that.
        """
        if plan.resident_layers or not needs.copies:
            return 0.0
        slot = needs.planned_spec(plan, prompt).slot_numel * needs.dtype.itemsize
        return slot / self.hardware.link_in

    def _selecting_s(
        self, needs: Requirements, plan: MemoryPlan, prompt: int, drafted: int
    ) -> float:
        """Return the seconds that selections take, a verification."""
        layers = len(needs.retrieval_layers(needs.planned_spec(plan, prompt)))
        if not layers or not POLICY_SPECS[needs.settings.policy].reselects:
            return 0.0
        kv = needs.layout.bytes(prompt, layers)
        tokens = expected_tokens(self.acceptance.of(needs, plan), drafted)
        often = min(1.0, tokens / needs.selection_interval(plan))
        return often * selection_s(self.hardware, kv)

    def _drafts(self, needs: Requirements) -> bool:
        return needs.draft is not None and needs.has_draft

    def _inner_draft(self, needs: Requirements) -> int:
        return needs.settings.num_inner_draft_tokens or INNER_DRAFT
