"""Sampling options, and the distribution that tokens are sampled from.

torch is imported on first use, so that the command line can read the options without it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from decoding.config.option import SAMPLING, check_options, option
from offload.errors import TierForceError

if TYPE_CHECKING:
    from torch import Generator, Tensor

MIN_TEMPERATURE = 1e-30  # below it, logits / temperature overflow
MIN_TOP_P = 1e-30  # smaller values are 0 in float32
_TOP = 1024  # tokens with nearly all probability mass of most distributions


@dataclass(frozen=True)
class Sampling:
    """Options that turn logits into the distribution every level samples from."""

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

    def padded_to(self, vocab: int) -> PaddedSampling:
        """Return the same sampling for a draft model with more or fewer tokens than `vocab`."""
        return PaddedSampling(**asdict(self), vocab=vocab)

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities (T, V) float32 of logits (T, V).

        Temperature comes first, then top-k, then top-p: the smallest set of tokens whose
        probability mass reaches top_p (Holtzman et al. 2019). A row with a NaN stays NaN, and is
        detected in `rejection_sampler.to_host`.
        """
        if self.temperature == 0:
            greedy = logits.new_zeros(logits.shape)
            greedy.scatter_(1, logits.argmax(1, keepdim=True), 1.0)
            return greedy.masked_fill_(logits.isnan().any(1, keepdim=True), math.nan)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[1]:
            threshold = logits.topk(self.top_k, dim=1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, -math.inf)
        probs = logits.softmax(1)
        return probs if self.top_p == 1 else nucleus(probs, self.top_p)


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


@dataclass(frozen=True)
class PaddedSampling(Sampling):
    """The same sampling for a draft model whose vocabulary is padded differently than the target's.

    Its distributions are over the target's `vocab`, as verification requires: tokens that the draft
    model lacks have probability 0, and tokens that only the draft model has are no candidates.
    """

    vocab: int = 0

    def probs(self, logits: Tensor) -> Tensor:
        """Return the probabilities (T, vocab) float32 of logits (T, vocabulary of the draft)."""
        probs = super().probs(logits[:, : self.vocab])
        padded = probs.new_zeros(len(probs), self.vocab)
        padded[:, : probs.shape[1]] = probs
        return padded


def draw(probs: Tensor, generator: Generator) -> Tensor:
    """Sample one token (1,) from probs (V,), without a device synchronization.

    The probabilities need not be normalized. A one-hot distribution always gives its token.
    """
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
