"""The cost model: rates of a hardware profile, scaled by the measured rounds of past requests.

A prediction is only as good as its inputs: the hardware numbers (`profiles.json` names their
sources) and the acceptance rate, which depends on the models and the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from decoding.config.defaults import HIGH_BYTE_SHARE, INNER_DRAFT, RECONSTRUCTION_TRAFFIC
from decoding.planning.activations import prefill_chunk
from decoding.planning.calibration import Calibration
from decoding.planning.forecast import Forecast
from decoding.planning.forward_cost import ForwardCost, forward_cost, selection_s
from decoding.planning.hardware_profile import HardwareProfile, Trust
from decoding.planning.plan import Plan, ahead_bytes, effective_device_tokens, tokens_ahead
from decoding.planning.requirements import Requirements
from decoding.planning.round_cost import Acceptance, RoundCost
from decoding.speculation.draft_length import RoundStats, best_length, expected_tokens
from offload.layout import ceil_div
from offload.retrieval.policy_specs import POLICY_SPECS
from offload.tiered.shape import WINDOWED


class CostModel:
    """The seconds of forwards, rounds and requests on one machine."""

    def __init__(
        self,
        hardware: HardwareProfile,
        acceptance: Acceptance | None = None,
        trust: Trust = Trust.ALL,
    ):
        """Predict from a profile until requests are recorded; `acceptance` is assumed until then.

        `trust`: between which strategies these predictions may choose.
        """
        self.hardware, self.trust = hardware, trust
        self.acceptance = acceptance or Acceptance()
        self.calibration = Calibration()

    def record(self, plan: Plan, rounds: Sequence[RoundStats]) -> bool:
        """Record a finished request's rounds; return whether they were informative."""
        return self.calibration.record(plan, rounds, self._predicted)

    def round_cost(self, plan: Plan) -> RoundCost:
        """Return the cost of a round."""
        return self.calibration.scaled(plan, self._predicted(plan))

    def token_s(self, plan: Plan) -> float:
        """Return the seconds per token with the best draft length."""
        return self._best_length(plan, self.round_cost(plan))[1]

    def forecast(self, plan: Plan) -> Forecast:
        """Return the predicted times of one request out of `plan.concurrency` in a batch."""
        spec, needs, cost = plan.spec, plan.requirements, self.round_cost(plan)
        drafting = self.calibration.drafting(plan)
        length, token_s = self._best_length(plan, cost)
        deferred_bytes = plan.prompt_spec.deferred_bytes(spec.prompt)
        chunks = ceil_div(spec.prompt, prefill_chunk(needs, spec.prompt))
        prefill_s, prefill_bound = self._target(needs).prefill(
            spec.prompt, plan.link_bytes + deferred_bytes, chunks, needs.settings.deterministic
        )
        prefill_s += deferred_bytes / self.hardware.link_in  # onloading after prefill
        layers = plan.prompt_spec.counts.items()
        windows = sum(count * each.host_bytes for each, count in layers if each.kind == WINDOWED)
        prefill_s += windows / self.hardware.link_out  # prefill waits for these copies
        return Forecast(
            prefill_s=prefill_s,
            prefill_bound=prefill_bound,
            verification_s=cost.verification_s(length),
            verification_bound=cost.verification_bound(length),
            link_s=cost.link_s,
            compute_s=cost.compute_s(length),
            split_s=drafting * self.on_device_s(plan, 1) if needs.has_split else 0.0,
            retrieval_s=drafting * self.retrieval_s(plan),
            draft_s=drafting * self.draft_s(plan),
            drafting_s=cost.drafting_s(length),
            num_draft_tokens=length,
            tokens_per_verification=cost.tokens(length),
            token_s=token_s,
            decode_s=spec.max_new_tokens * token_s,
            document_s=prefill_s + spec.max_new_tokens * token_s,
            concurrency=plan.concurrency,
        )

    def retrieval_s(self, plan: Plan) -> float:
        """Return the seconds of a forward over the retrieval cache; 0 without one."""
        needs = plan.requirements
        if not needs.has_retrieval:
            return 0.0
        drafted = _inner_draft(needs) if needs.draft is not None and needs.has_draft else 0
        kv_scale = self.hardware.int8_share if needs.int8_retrieval else 1.0
        budget = min(needs.strategy.budget, plan.spec.prompt)
        captured = bool(needs.settings.graphs)
        return self._target(needs).seconds(
            drafted + 1, budget, plan.concurrency, kv_scale, captured
        )

    def draft_s(self, plan: Plan) -> float:
        """Return the seconds of a forward of the draft model; 0 without one."""
        needs = plan.requirements
        if needs.draft is None or not needs.has_draft:
            return 0.0
        cost = forward_cost(self.hardware, needs.draft, needs.draft_ranks, needs.dtype)
        attended = plan.spec.draft.window
        return cost.seconds(1, attended, plan.concurrency, captured=bool(needs.settings.graphs))

    def on_device_s(self, plan: Plan, query_tokens: int) -> float:
        """Return the seconds of a forward over the on-device part of the target's cache."""
        hardware = self.hardware
        kv_rate = hardware.kv_rate or hardware.memory_rate
        split_share = kv_rate / (hardware.high_bits_rate or kv_rate / HIGH_BYTE_SHARE)
        attended = round(effective_device_tokens(plan, split_share))
        return self._target(plan.requirements).seconds(query_tokens, attended, plan.concurrency)

    def _predicted(self, plan: Plan) -> RoundCost:
        """Return the cost of a round by the profile's rates, with measured acceptance."""
        acceptance = 1 - self.calibration.rejection(plan, 1 - self.acceptance.rate(plan))
        reconstruction_s = plan.concurrency * self._reconstruction_s(plan)
        forwards = self._target(plan.requirements)

        @cache  # asked for several times by each search for a draft length
        def compute_s(drafted: int) -> float:
            selection_s = self._selection_s(plan, expected_tokens(acceptance, drafted))
            verification_s = _verification_s(forwards, plan, drafted + 1)
            return verification_s + reconstruction_s + plan.concurrency * selection_s

        return RoundCost(
            link_s=plan.concurrency * plan.link_bytes / self.hardware.link_in,
            compute_s=compute_s,
            drafted_s=self._drafted_s(plan),
            acceptance=acceptance,
            uncovered_s=plan.uncovered_bytes / self.hardware.link_in,
            ahead_s=plan.concurrency * ahead_bytes(plan) / self.hardware.link_in,
            max_ahead=tokens_ahead(plan),
        )

    def _best_length(self, plan: Plan, cost: RoundCost) -> tuple[int, float]:
        needs = plan.requirements
        if needs.mode == "plain":
            return 0, cost.verification_s(0)
        return cost.best_length(needs.settings.draft_length_range(needs.mode))

    def _target(self, requirements: Requirements) -> ForwardCost:
        """Return the cost of the target's forwards."""
        needs = requirements
        return forward_cost(self.hardware, needs.target, needs.ranks, needs.dtype)

    def _drafted_s(self, plan: Plan) -> float:
        """Return the seconds per token drafted for the target."""
        needs, acceptance = plan.requirements, self.acceptance
        retrieval, draft = self.retrieval_s(plan), self.draft_s(plan)
        token_s = draft
        if needs.has_retrieval:
            token_s = retrieval
            if draft:
                inner = _inner_draft(needs)
                tokens = expected_tokens(acceptance.draft_rate, inner)
                token_s = (retrieval + inner * draft) / tokens
        if not needs.has_split:
            return token_s
        if not token_s:
            return self.on_device_s(plan, 1)
        rate = acceptance.draft_rate
        if needs.has_retrieval:
            budget = needs.strategy.budget
            prior = 1 - acceptance.retrieval_rate(budget)
            rate = 1 - self.calibration.retrieval_rejection(budget, prior)
        _, drafted_s = best_length(
            needs.settings.inner_draft_length_range,
            rate,
            lambda n: self.on_device_s(plan, n + 1) + n * token_s,
        )
        return drafted_s

    def _reconstruction_s(self, plan: Plan) -> float:
        """Return the seconds per verification to reconstruct split or compressed layers."""
        rate = self.hardware.reconstruct_rate or self.hardware.memory_rate / RECONSTRUCTION_TRAFFIC
        counts = plan.prompt_spec.counts.items()
        layers = sum(count for layer, count in counts if layer.format is not None)
        return plan.requirements.layout.bytes(plan.spec.prompt, layers) / rate

    def _selection_s(self, plan: Plan, tokens: float) -> float:
        """Return the seconds of selection per verification, which yields `tokens`."""
        needs, layers = plan.requirements, plan.selecting_layers
        if not layers or not POLICY_SPECS[needs.settings.policy].reselects:
            return 0.0
        selections = min(1.0, tokens / plan.selection_interval)
        nbytes = needs.layout.in_pairs.bytes(plan.spec.prompt, layers)
        return selections * selection_s(self.hardware, nbytes)


def _verification_s(forwards: ForwardCost, plan: Plan, query_tokens: int) -> float:
    """Return the seconds of a forward over the whole target cache."""
    prompt = plan.spec.prompt
    if plan.requirements.settings.deterministic:
        return forwards.batch_invariant_seconds(query_tokens, prompt)
    return forwards.seconds(query_tokens, prompt, plan.concurrency)


def _inner_draft(requirements: Requirements) -> int:
    return requirements.settings.num_inner_draft_tokens or INNER_DRAFT
