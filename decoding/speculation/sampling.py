"""Sampling options, and the distribution that tokens are sampled from.

torch is imported on first use, so that the command line can read the options without it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoding.config.option import PYTHON, SAMPLING, check_options, option
from offload.errors import TierForceError

if TYPE_CHECKING:
    from torch import Generator, Tensor

MIN_TEMPERATURE = 1e-30  # below it, logits / temperature overflow
MIN_TOP_P = 1e-30  # smaller values are 0 in float32
MAX_BIAS = 100
MAX_PENALTY = 2  # presence and frequency penalties, in both directions
MIN_REPETITION, MAX_REPETITION = 0.01, 100
_ALWAYS = ("temperature", "top_k", "top_p", "seed")
_TOP = 1024  # tokens with nearly all probability mass of most distributions


@dataclass(frozen=True)
class Sampling:
    """Options that turn logits into the distribution every level samples from.

    `logit_bias` comes first, then the penalties (`Penalties`), and then what `probs` does.
    """

    temperature: float = option(
        "Sampling temperature.",
        value=0.6,
        zero="greedy",
        minimum=0,
    )
    top_k: int = option(
        "Sample only from this many of the most likely tokens.",
        value=0,
        group=SAMPLING,
        unit="tokens",
        zero="off",
        minimum=0,
    )
    top_p: float = option(
        "Sample only from the most likely tokens that together have this probability, at most 1.",
        value=0.9,
    )
    seed: int = option(
        "Seed of the random numbers. The same seed guarantees the same output only with "
        "--deterministic: otherwise it also depends on draft lengths, which adapt to measured "
        "times.",
        value=0,
        group=SAMPLING,
    )
    min_p: float = option(
        "Sample only from tokens at least this fraction as likely as the most likely one.",
        value=0.0,
        group=SAMPLING,
        zero="off",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = option(
        "Divide the positive logits of tokens in the prompt or the answer so far by this number, "
        f"and multiply the negative ones by it: from {MIN_REPETITION} to {MAX_REPETITION}; 1 is "
        "off.",
        value=1.0,
        group=SAMPLING,
    )
    presence_penalty: float = option(
        f"Subtract this from the logits of tokens in the answer so far, from -{MAX_PENALTY} to "
        f"{MAX_PENALTY}.",
        value=0.0,
        group=SAMPLING,
        zero="off",
        minimum=-MAX_PENALTY,
        maximum=MAX_PENALTY,
    )
    frequency_penalty: float = option(
        "Subtract this from the logits of tokens in the answer so far, once for each time they "
        f"occur, from -{MAX_PENALTY} to {MAX_PENALTY}.",
        value=0.0,
        group=SAMPLING,
        zero="off",
        minimum=-MAX_PENALTY,
        maximum=MAX_PENALTY,
    )
    logit_bias: dict[int, float] | None = option(  # noqa: RUF009 - as above, but for a dict
        f"Numbers from -{MAX_BIAS} to {MAX_BIAS} that are added to the logits of these token ids.",
        value=None,
        default="none",
        group=PYTHON,
        unit="numbers by token id",
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for invalid values."""
        check_options(self)
        if self.temperature == float("inf"):
            raise TierForceError("`temperature` must be a finite number, found inf.")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise TierForceError(
                f"`temperature` must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, found "
                f"{self.temperature:g}."
            )
        if not MIN_TOP_P <= self.top_p <= 1:
            raise TierForceError(
                f"`top_p` must be at least {MIN_TOP_P:g} and at most 1, found {self.top_p}."
            )
        if not 0 <= self.seed < 2**63:
            raise TierForceError(f"`seed` must be between 0 and 2**63 - 1, found {self.seed}.")
        if not MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            raise TierForceError(
                f"`repetition_penalty` must be from {MIN_REPETITION} to {MAX_REPETITION}, found "
                f"{self.repetition_penalty}."
            )
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or token < 0:
                raise TierForceError(f"`logit_bias` must have token ids as keys, found {token!r}.")
            if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
                raise TierForceError(
                    f"`logit_bias` must have values from -{MAX_BIAS} to {MAX_BIAS}, found "
                    f"{bias!r} for token {token}."
                )

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        own = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return own != (1, 0, 0)

    def changes(self) -> dict[str, Any]:
        """Return the options beside temperature, top-k, top-p and seed that have an effect."""
        own = {name: value for name, value in vars(self).items() if name not in _ALWAYS}
        own["logit_bias"] = self.logit_bias or None
        return {name: value for name, value in own.items() if value != getattr(GREEDY, name)}

    def as_dict(self) -> dict[str, Any]:
        """Return temperature, top-k, top-p and seed, and what else has an effect."""
        return {name: getattr(self, name) for name in _ALWAYS} | self.changes()

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities (T, V) float32 of logits (T, V).

        Temperature comes first, then top-k, then top-p: the smallest set of tokens whose
        probability mass reaches top_p (Holtzman et al. 2019), then min-p (Nguyen et al. 2024, arXiv
        2407.01082), as in transformers. A row with a NaN stays NaN, and is detected in
        `rejection_sampler.to_host`.
        """
        if self.temperature == 0:
            greedy = logits.new_zeros(logits.shape)
            greedy.scatter_(1, logits.argmax(1, keepdim=True), 1.0)
            return greedy.masked_fill_(logits.isnan().any(1, keepdim=True), math.nan)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[1]:
            # not in order: to sort many takes more memory than all the rest
            largest = logits.topk(self.top_k, dim=1, sorted=False).values
            threshold = largest.amin(1, keepdim=True)
            logits = logits.masked_fill(logits < threshold, -math.inf)
        probs = logits.softmax(1)
        if self.top_p < 1:
            probs = nucleus(probs, self.top_p)
        if self.min_p > 0:
            rare = probs < self.min_p * probs.amax(1, keepdim=True)
            probs = probs.masked_fill(rare, 0)
            probs = probs / probs.sum(1, keepdim=True)
        return probs


GREEDY = Sampling(temperature=0)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return probs (T, V) restricted to the fewest most likely tokens whose mass reaches top_p.

    On a CPU, where a data-dependent branch costs no synchronization, only the most likely tokens
    are sorted at first: sorting a whole vocabulary takes longer there than the rest of sampling.
    """
    if not probs.is_cpu or probs.shape[1] <= _TOP:
        return _keep_nucleus(probs, *probs.sort(dim=1, descending=True), top_p)
    ordered, order = probs.topk(_TOP, dim=1)
    kept = _keep_nucleus(probs, ordered, order, top_p)
    # decided per row, independent of the other rows; rows with a NaN also take this path
    if len(flat := (~(ordered.cumsum(1)[:, -1] >= top_p)).nonzero().flatten()):
        kept[flat] = _keep_nucleus(probs[flat], *probs[flat].sort(dim=1, descending=True), top_p)
    return kept


def _keep_nucleus(probs: Tensor, ordered: Tensor, order: Tensor, top_p: float) -> Tensor:
    """Return probs (T, V) of the most likely tokens alone.

    `ordered` (T, K) has their probabilities in descending order, `order` (T, K) their ids.
    """
    # the token that crosses the threshold is kept
    outside = ordered.cumsum(1) - ordered >= top_p
    kept = probs.new_zeros(probs.shape).scatter_(1, order, ordered.masked_fill(outside, 0))
    return kept / kept.sum(1, keepdim=True)


def draw(probs: Tensor, generator: Generator) -> Tensor:
    """Sample one token (1,) from probs (V,), without a device synchronization.

    The probabilities need not be normalized. A one-hot distribution always gives its token. On a
    CPU tokens without probability get no noise if they are the majority: noise takes longest.
    """
    if probs.is_cpu and 0 < int(probs.count_nonzero()) < len(probs) // 2:
        possible = probs.nonzero().flatten()
        return possible[_race(probs[possible], generator)]
    return _race(probs, generator)


def _race(probs: Tensor, generator: Generator) -> Tensor:
    """Return the winner (1,) of an exponential race, as `exponential_race`."""
    # float64: float32 noise comes in steps of 2**-24, too coarse for the many tokens of a
    # vocabulary that are rarer than that
    import torch

    noise = torch.empty_like(probs, dtype=torch.float64).exponential_(generator=generator)
    return exponential_race(probs, noise)


def exponential_race(probs: Tensor, noise: Tensor) -> Tensor:
    """Return the winner (1,) of an exponential race with rates probs (V,): argmin noise / probs.

    With standard exponential noise (V,) float64 the winner is distributed as probs.
    """
    return (probs / noise.clamp(min=sys.float_info.min)).argmax(0, keepdim=True)
