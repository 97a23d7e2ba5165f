"""The cost model of a decoding round, fed by hardware numbers or by measured rounds.

    time per token = (max(link, compute) of a verification + drafting) / tokens per verification

A prediction is only as good as its inputs: hardware rates (`profiles.json` names their sources) or
timings of earlier requests, and the acceptance rate, which depends on the models and the prompt.
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
    """The seconds of one decoding round, as a function of the number of draft tokens."""

    link_s: float  # transfer of the host layers' KV
    compute_s: Callable[[int], float]  # verification compute, by number of draft tokens
    drafted_s: float  # per draft token
    acceptance: float  # probability that a draft token is accepted if all before it are
    uncovered_s: float = 0.0  # copies that compute-bound verifications cannot hide
    other_s: float = 0.0  # verification time explained by neither link nor compute

    def verification_s(self, drafted: int) -> float:
        """Return the seconds of a verification."""
        return max(self.link_s, self.compute_s(drafted) + self.uncovered_s) + self.other_s

    def verification_bound(self, drafted: int) -> str:
        """Return what bounds a verification: link or compute."""
        compute = self.compute_s(drafted) + self.uncovered_s
        return "link" if self.link_s >= compute else "compute"

    def tokens(self, drafted: int) -> float:
        """Return the expected number of tokens per round."""
        return expected_tokens(self.acceptance, drafted)

    def best_length(self, lengths: Iterable[int]) -> tuple[int, float]:
        """Return the draft length with the fewest seconds per token, and those seconds."""
        return best_length(
            lengths, self.acceptance, lambda n: self.verification_s(n) + n * self.drafted_s
        )


class CostSource(Protocol):
    """A source of round costs: predicted or measured."""

    def round_cost(
        self, requirements: Requirements, plan: MemoryPlan, prompt: int
    ) -> RoundCost | None:
        """Return the cost with the strategy of `requirements`; None if it is unknown."""

    def record(
        self,
        requirements: Requirements,
        plan: MemoryPlan,
        prompt: int,
        rounds: Sequence[RoundStats],
    ) -> bool:
        """Record a finished request; return whether it was informative."""


def link_bytes(requirements: Requirements, plan: MemoryPlan, prompt: int) -> int:
    """Return the bytes of KV that one rank's link transfers per verification."""
    return requirements.planned_spec(plan, prompt).streamed_bytes(prompt)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates of draft tokens: by the target, and by the level below it."""

    target: float = ACCEPTANCE  # proposals of a retrieval cache or of prompt lookup
    inner: float = INNER_ACCEPTANCE  # proposals of a draft model, to any level
    budget: int = DEFAULT_RETRIEVAL_BUDGET  # the retrieval budget `target` refers to
    # Whether all levels share the noise of a position (`deterministic`). `target` and `inner` are
    # rates with independent noise.
    is_coupled: bool = False

    def rate(self, requirements: Requirements, plan: MemoryPlan) -> float:
        """Return the target's acceptance rate with this budget and the plan's split layers."""
        if not requirements.may_retrieve:
            return self.draft_rate if requirements.has_draft else self._coupled(1 - self.target)
        return self._coupled(self._default_rejection * rejection_ratio(requirements, plan))

    def retrieval_rate(self, requirements: Requirements) -> float:
        """Return the acceptance rate of tokens drafted on a retrieval cache of this budget."""
        return self._coupled(
            self._default_rejection * retrieval_rejection_ratio(requirements.budget)
        )

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


def rejection_ratio(requirements: Requirements, plan: MemoryPlan) -> float:
    """Return the target's rejection rate relative to the default budget without split layers."""
    retrieval = retrieval_rejection_ratio(requirements.budget)
    if not requirements.has_split:
        return retrieval
    layers = requirements.target.layers
    split = SPLIT_REJECTION * plan.split_layers / layers
    uncovered = (layers - plan.resident_layers - plan.split_layers) / layers
    return split + max(0.0, retrieval - split) * uncovered**UNCOVERED_EXPONENT


class PredictedCosts:
    """Round costs predicted from hardware numbers, for one request or several in one batch."""

    def __init__(self, hardware: HardwareProfile, acceptance: Acceptance, concurrency: int = 1):
        self.hardware = hardware
        self.acceptance = acceptance
        self.concurrency = concurrency

    def round_cost(self, requirements: Requirements, plan: MemoryPlan, prompt: int) -> RoundCost:
        return RoundCost(
            link_s=self.concurrency
            * link_bytes(requirements, plan, prompt)
            / self.hardware.link_in,
            compute_s=lambda drafted: (
                self._verification_s(requirements, drafted + 1, prompt)
                + self.concurrency * self._reconstruction_s(requirements, plan, prompt)
                + self.concurrency * self._selection_s(requirements, plan, prompt, drafted)
            ),
            drafted_s=self._drafted_s(requirements, plan, prompt),
            acceptance=self.acceptance.rate(requirements, plan),
            uncovered_s=self._first_copy_s(requirements, plan, prompt),
        )

    def record(
        self,
        requirements: Requirements,
        plan: MemoryPlan,
        prompt: int,
        rounds: Sequence[RoundStats],
    ) -> bool:
        return False  # hardware numbers do not change

    def retrieval_s(self, requirements: Requirements, prompt: int) -> float:
        """Return the seconds of a forward over the retrieval cache."""
        if not requirements.has_retrieval:
            return 0.0
        drafted = self._inner_draft(requirements) if self._drafts(requirements) else 0
        kv_scale = self.hardware.int8_share if requirements.int8_retrieval else 1.0
        budget = min(requirements.budget, prompt)
        return target_cost(self.hardware, requirements).seconds(
            drafted + 1, budget, self.concurrency, kv_scale, _captures(requirements)
        )

    def draft_s(self, requirements: Requirements) -> float:
        """Return the seconds of a forward of the draft model."""
        if requirements.draft is None or not requirements.has_draft:
            return 0.0
        cost = ForwardCost(
            self.hardware, requirements.draft, requirements.draft_ranks, requirements.dtype
        )
        captured = _captures(requirements)
        return cost.seconds(1, requirements.window, self.concurrency, captured=captured)

    def on_device_s(
        self, requirements: Requirements, plan: MemoryPlan, prompt: int, query_tokens: int
    ) -> float:
        """Return the seconds of a forward over the on-device part of the target's cache."""
        hardware = self.hardware
        kv_rate = hardware.kv_rate or hardware.memory_rate
        split_share = kv_rate / (hardware.high_bits_rate or kv_rate / HIGH_BYTE_SHARE)
        attended = round(requirements.effective_device_tokens(plan, prompt, split_share))
        return target_cost(hardware, requirements).seconds(query_tokens, attended, self.concurrency)

    def _verification_s(self, requirements: Requirements, query_tokens: int, prompt: int) -> float:
        """Return the seconds of a forward over the whole target cache."""
        cost = target_cost(self.hardware, requirements)
        if requirements.settings.deterministic:
            return cost.batch_invariant_seconds(query_tokens, prompt)
        return cost.seconds(query_tokens, prompt, self.concurrency)

    def _drafted_s(self, requirements: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds per token drafted for the target."""
        retrieval, draft = self.retrieval_s(requirements, prompt), self.draft_s(requirements)
        token_s = draft
        if requirements.has_retrieval:
            token_s = retrieval
            if draft:
                inner = self._inner_draft(requirements)
                tokens = expected_tokens(self.acceptance.draft_rate, inner)
                token_s = (retrieval + inner * draft) / tokens
        if not requirements.has_split:
            return token_s
        if not token_s:
            return self.on_device_s(requirements, plan, prompt, 1)
        acceptance = self.acceptance
        rate = acceptance.draft_rate
        if requirements.has_retrieval:
            rate = acceptance.retrieval_rate(requirements)
        _, drafted_s = best_length(
            requirements.inner_lengths,
            rate,
            lambda n: self.on_device_s(requirements, plan, prompt, n + 1) + n * token_s,
        )
        return drafted_s

    def _reconstruction_s(self, requirements: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds per verification to reconstruct split or compressed layers."""
        shape = requirements.planned_spec(plan, prompt)
        rate = self.hardware.reconstruct_rate or self.hardware.memory_rate / RECONSTRUCTION_TRAFFIC
        return requirements.layout.bytes(prompt, shape.split_or_compressed_layers) / rate

    def _first_copy_s(self, requirements: Requirements, plan: MemoryPlan, prompt: int) -> float:
        """Return the seconds of the first slot's copy if no resident layer's compute hides it.

        Link-bound verifications already include it.
        """
        if plan.resident_layers or not requirements.copies:
            return 0.0
        slot = requirements.planned_spec(plan, prompt).slot_numel * requirements.dtype.itemsize
        return slot / self.hardware.link_in

    def _selection_s(
        self, requirements: Requirements, plan: MemoryPlan, prompt: int, drafted: int
    ) -> float:
        """Return the seconds of selection per verification."""
        layers = len(requirements.retrieval_layers(requirements.planned_spec(plan, prompt)))
        if not layers or not POLICY_SPECS[requirements.settings.policy].reselects:
            return 0.0
        kv = requirements.layout.bytes(prompt, layers)
        tokens = expected_tokens(self.acceptance.rate(requirements, plan), drafted)
        selections = min(1.0, tokens / requirements.selection_interval(plan))
        return selections * selection_s(self.hardware, kv)

    def _drafts(self, requirements: Requirements) -> bool:
        return requirements.draft is not None and requirements.has_draft

    def _inner_draft(self, requirements: Requirements) -> int:
        return requirements.settings.num_inner_draft_tokens or INNER_DRAFT


def _captures(requirements: Requirements) -> bool:
    """Return whether short forwards on caches of fixed size are CUDA graphs, on a GPU."""
    settings = requirements.settings
    return settings.graphs is not False and not settings.deterministic
