"""How long one document will take on a machine, from the machine's numbers alone."""

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
    """The times of one document, in seconds, and what a round of it yields."""

    prefill_s: float
    prefill_bound: str  # what prefill waits for: arithmetic, sums over ranks, or write-back
    verification_s: float  # of plain decoding, a pass of the target
    verification_bound: str  # link or compute
    link_s: float  # of a verification
    compute_s: float  # of a verification, beside the link
    split_s: float  # a pass over what the device has of the target's cache
    retrieval_s: float  # a pass over the retrieval cache
    draft_s: float  # a pass of the draft model
    drafting_s: float  # all of a round's draft
    num_draft_tokens: int
    tokens_per_verification: float
    token_s: float
    decode_s: float  # all new tokens
    document_s: float  # prefill and all new tokens
    concurrency: int = 1  # that share passes: times are a text's own, less others' prefill

    @property
    def documents_per_hour(self) -> float:
        """Return how many documents like this one are done in an hour."""
        return 3600 / (self.prefill_s + self.decode_s / self.concurrency)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "documents_per_hour": self.documents_per_hour}


def forecast(
    needs: Requirements,
    plan: MemoryPlan,
    hardware: HardwareProfile,
    prompt: int,
    new: int,
    acceptance: Acceptance,
    concurrency: int = 1,
) -> Forecast:
    """Predict the times of a document of `prompt` + `new` tokens, one of `concurrency`."""
    costs = PredictedCosts(hardware, acceptance, concurrency)
    cost = costs.round_cost(needs, plan, prompt)
    length, token_s = 0, cost.verification_s(0)
    if needs.mode != "plain":
        length, token_s = cost.best_length(needs.draft_lengths)
    deferred = needs.planned_spec(plan, prompt).deferred_bytes(prompt)
    written = link_bytes(needs, plan, prompt) + deferred
    prefill_s, prefill_bound = target_cost(hardware, needs).prefill(prompt, written)
    prefill_s += deferred / hardware.link_in  # back to the device, behind all else
    return Forecast(
        prefill_s=prefill_s,
        prefill_bound=prefill_bound,
        verification_s=cost.verification_s(length),
        verification_bound=cost.verification_bound(length),
        link_s=cost.link_s,
        compute_s=cost.compute_s(length),
        split_s=costs.on_device_s(needs, plan, prompt, 1) if needs.has_split else 0.0,
        retrieval_s=costs.retrieval_s(needs, prompt),
        draft_s=costs.draft_s(needs),
        drafting_s=length * cost.drafted_s,
        num_draft_tokens=length,
        tokens_per_verification=cost.tokens(length),
        token_s=token_s,
        decode_s=new * token_s,
        document_s=prefill_s + new * token_s,
        concurrency=concurrency,
    )
