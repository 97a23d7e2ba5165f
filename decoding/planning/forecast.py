"""The predicted times of one document on a machine, from hardware numbers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from decoding.planning.cost import Acceptance, PredictedCosts, link_bytes
from decoding.planning.forward_cost import target_cost
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.memory_requirements import Requirements


@dataclass(frozen=True)
class Forecast:
    """The predicted times of one document in seconds, and the yield of a decoding round."""

    prefill_s: float
    prefill_bound: str  # compute, all-reduce, or write-back
    verification_s: float  # one target forward; in plain mode, one token
    verification_bound: str  # link or compute
    link_s: float  # per verification
    compute_s: float  # per verification, overlapping the link
    split_s: float  # a forward over the on-device part of the target's cache
    retrieval_s: float  # a forward over the retrieval cache
    draft_s: float  # a forward of the draft model
    drafting_s: float  # all draft tokens of a round
    num_draft_tokens: int
    tokens_per_verification: float
    token_s: float
    decode_s: float  # all generated tokens
    document_s: float  # prefill and decoding
    concurrency: int = (
        1  # batched requests; times are per request, without the prefill of the others
    )

    @property
    def documents_per_hour(self) -> float:
        """Return the throughput in such documents per hour."""
        return 3600 / (self.prefill_s + self.decode_s / self.concurrency)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "documents_per_hour": self.documents_per_hour}


def forecast(
    requirements: Requirements,
    plan: MemoryPlan,
    hardware: HardwareProfile,
    prompt: int,
    max_new_tokens: int,
    acceptance: Acceptance,
    concurrency: int = 1,
) -> Forecast:
    """Predict the times of one document out of `concurrency` in a batch."""
    costs = PredictedCosts(hardware, acceptance, concurrency)
    cost = costs.round_cost(requirements, plan, prompt)
    length, token_s = 0, cost.verification_s(0)
    if requirements.mode != "plain":
        length, token_s = cost.best_length(requirements.draft_lengths)
    deferred_bytes = requirements.planned_spec(plan, prompt).deferred_bytes(prompt)
    written_bytes = link_bytes(requirements, plan, prompt) + deferred_bytes
    prefill_s, prefill_bound = target_cost(hardware, requirements).prefill(prompt, written_bytes)
    prefill_s += deferred_bytes / hardware.link_in  # onloading after prefill
    return Forecast(
        prefill_s=prefill_s,
        prefill_bound=prefill_bound,
        verification_s=cost.verification_s(length),
        verification_bound=cost.verification_bound(length),
        link_s=cost.link_s,
        compute_s=cost.compute_s(length),
        split_s=costs.on_device_s(requirements, plan, prompt, 1) if requirements.has_split else 0.0,
        retrieval_s=costs.retrieval_s(requirements, prompt),
        draft_s=costs.draft_s(requirements),
        drafting_s=length * cost.drafted_s,
        num_draft_tokens=length,
        tokens_per_verification=cost.tokens(length),
        token_s=token_s,
        decode_s=max_new_tokens * token_s,
        document_s=prefill_s + max_new_tokens * token_s,
        concurrency=concurrency,
    )
