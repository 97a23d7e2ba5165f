"""What a text's device memory is spent on, retrieval budget or resident layers, by what past texts
took.

A layer more on the device saves its share of a verification's link time; budget raises acceptance,
and makes drafting dearer. The first price follows from bytes and the link's rate; the others are
seen while texts are decoded, so a text's choice depends on texts before it alone, and its law is
what it would be with any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

from decoding.planning.forecast import EXPONENT, accepted_with, expected_tokens
from decoding.planning.needs import MOST
from decoding.runtime import Runtime, plan
from decoding.settings import BUDGET
from decoding.speculation.draft_length import RoundStats
from offload.bandwidth import Copies
from offload.errors import FitError
from offload.memory_plan import MemoryPlan
from parallel.loading import parameter_bytes

_RATE, _PRIOR = 0.07, 24.0  # rejected with BUDGET, on so many tokens, before anything was seen
# tokens seen with a budget from which its own rejections count for more than what others say of it
_OWN = 200.0
_FORGET = 0.5  # what a text still counts after the next with its budget
_WORTH = 0.95  # of the predicted time with the budget in use: a change must promise as little
_ROUNDS = 4  # a text of fewer says nothing
_PROBED, _PROBED_S = 4 << 20, 0.1  # bytes and seconds of the copies that tell the link's rate
_LATE = 1.2  # verifications that take so many times the link's time wait for compute


@dataclass
class Past:
    """Texts with one budget."""

    tested: float = 0.0  # tokens
    rejected: float = 0.0
    drafted_s: float = 0.0  # a drafted token


@dataclass(frozen=True)
class Choice:
    """Of one text. A budget of None is none: nothing was to be chosen."""

    budget: int | None
    why: str


def affordable(models: Runtime, prompt: int, new: int) -> dict[int, MemoryPlan]:
    """Where a text's KV would go, by the budgets that fit, of those that differ for it. Raises
    FitError where none does.
    """
    if models.settings.budget is not None or not models.sizes.has_retrieval:
        return {models.sizes.budget: plan(models, prompt, new)}
    found, refusal = {}, None
    for budget in models.sizes.budgets(prompt + new):
        try:
            found[budget] = plan(models.with_budget(budget), prompt, new)
        except FitError as error:
            refusal = refusal or error
    if not found:
        raise refusal or FitError(
            f"--chunk-size {models.settings.chunk_size} is larger than any budget: give --budget."
        )
    return found


def link_rate(models: Runtime) -> float:
    """Bytes a second of the slowest rank's link while all copy: GPUs may share lanes. All ranks
    call it. Raises FitError.
    """
    group = models.target.group
    with group.together():
        copies = Copies(models.link, _PROBED)
    with closing(copies):
        return min(group.gather(copies.rate(out=False, seconds=_PROBED_S)))


class Split:
    """Chooses a budget for each text; layers take the rest of the memory."""

    def __init__(self) -> None:
        self._past: dict[int, Past] = {}
        self._budget = BUDGET
        # of the last text's verifications: what they took, and the link's part
        self._verify_s = self._link_s = 0.0

    def choose(
        self, models: Runtime, plans: Mapping[int, MemoryPlan], prompt: int, link_rate: float | None
    ) -> Choice:
        """One of the budgets planned for. `link_rate`: bytes a second; None where nothing is
        copied.
        """
        if len(plans) == 1:
            (budget,) = plans
            return Choice(budget, "the only one that fits or differs")
        usual = max((budget for budget in plans if budget <= self._budget), default=min(plans))
        if not self._past:
            refused = next(
                (each for each in models.sizes.budgets(prompt) if usual < each <= BUDGET), None
            )
            return Choice(
                usual,
                "nothing is known of these models yet"
                + (f"; {refused} does not fit" if refused else ""),
            )
        times = {
            budget: self._token_s(models, budget, place, prompt, link_rate)
            for budget, place in plans.items()
        }
        best = min(times, key=times.__getitem__)
        if times[best] > _WORTH * times[usual]:
            best = usual
        said = (
            f"{1e3 * times[best]:.4g} ms/token predicted with {plans[best].resident_layers} layers "
            "on the device"
        )
        other = min((budget for budget in times if budget != best), key=times.__getitem__)
        said += (
            f", {1e3 * times[other]:.4g} with budget {other} and {plans[other].resident_layers} "
            "layers"
        )
        return Choice(best, said)

    def record(
        self,
        models: Runtime,
        place: MemoryPlan,
        prompt: int,
        link_rate: float | None,
        rounds: list[RoundStats],
    ) -> None:
        """A text is over. One that its budget held whole says nothing of longer ones: its proposals
        are the target's own.
        """
        budget = models.sizes.budget
        whole = [past for past in rounds if past.drafted]
        if len(whole) < _ROUNDS or prompt <= budget:
            return
        self._budget = budget
        past = self._past.setdefault(budget, Past())
        past.tested = _FORGET * past.tested + sum(
            each.accepted + (each.accepted < each.drafted) for each in whole
        )
        past.rejected = _FORGET * past.rejected + sum(
            each.accepted < each.drafted for each in whole
        )
        past.drafted_s = _middle(each.draft_s / each.drafted for each in whole)
        self._verify_s = _middle(each.verify_s for each in whole)
        self._link_s = _link_s(models, place, prompt, link_rate)

    def rejection(self, budget: int) -> float:
        """How often a drafted token is rejected when all before it stand, by all texts, those of
        this budget above others.
        """
        others = [(past, (seen / BUDGET) ** -EXPONENT) for seen, past in self._past.items()]
        usual = (_RATE * _PRIOR + sum(past.rejected for past, _ in others)) / (
            _PRIOR + sum(past.tested * scale for past, scale in others)
        )
        expected, own = 1 - accepted_with(1 - usual, budget), self._past.get(budget, Past())
        return (own.rejected + _OWN * expected) / (own.tested + _OWN)

    def _token_s(
        self, models: Runtime, budget: int, place: MemoryPlan, prompt: int, link_rate: float | None
    ) -> float:
        """Seconds a token, at the draft length that suits the budget."""
        link = _link_s(models, place, prompt, link_rate)
        # hidden, as far as is known
        compute = self._verify_s if self._verify_s > _LATE * self._link_s else 0.0
        verify = max(link, compute) + max(0.0, self._verify_s - max(self._link_s, compute))
        drafted, accepted = self._drafted_s(models, budget), 1 - self.rejection(budget)
        lengths = (
            range(1, MOST + 1)
            if models.settings.draft_length is None
            else [models.settings.draft_length]
        )
        return min((verify + n * drafted) / expected_tokens(accepted, n) for n in lengths)

    def _drafted_s(self, models: Runtime, budget: int) -> float:
        """Seconds a drafted token; of a budget not seen, from the nearest that was, by what a
        retrieval pass reads.
        """
        near = min(self._past, key=lambda seen: (max(seen, budget) / min(seen, budget), seen))
        layout = models.target.config.kv_layout(models.target.group.size, models.dtype)
        weights = parameter_bytes(models.target)
        return (
            self._past[near].drafted_s
            * (weights + layout.bytes(budget))
            / (weights + layout.bytes(near))
        )


def _link_s(models: Runtime, place: MemoryPlan, prompt: int, link_rate: float | None) -> float:
    """Seconds that the prompt's KV takes over the link."""
    if link_rate is None:
        return 0.0
    config = models.target.config
    layout = config.kv_layout(models.target.group.size, models.dtype)
    return layout.bytes(prompt, config.layers - place.resident_layers) / link_rate


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
