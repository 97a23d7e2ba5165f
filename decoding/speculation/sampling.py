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
_TOP = 1024  # tokens that hold nearly all probability mass of most distributions


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
        "--deterministic: otherwise it also depends on draft lengths, which adapt to measured times.",
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
        """Return the same sampling for a model that has more or fewer tokens than `vocab`."""
        return PaddedSampling(**asdict(self), vocab=vocab)

    def probs(self, logits: Tensor) -> Tensor:
        """Return the law (T, V) float32 that logits (T, V) stand for.

        A row with a NaN stays NaN, for `verify` to find. Temperature comes first, then top-k, then
        top-p: the smallest set of tokens whose mass reaches top_p (Holtzman et al. 2019).
        """
        if self.temperature == 0:
            greedy = logits.new_zeros(logits.shape)
            greedy.scatter_(1, logits.argmax(1, keepdim=True), 1.0)
            return greedy.masked_fill_(logits.isnan().any(1, keepdim=True), math.nan)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k, dim=1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        probs = logits.softmax(1)
        return probs if self.top_p == 1 else nucleus(probs, self.top_p)


GREEDY = Sampling(temperature=0)  # the likeliest token is taken


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return laws (T, V) cut to the fewest likeliest tokens whose mass reaches top_p.

    Where waiting for the device costs nothing, the likeliest tokens are looked at first: to sort a
    whole vocabulary takes a CPU longer than all else that drawing needs.
    """
    if not probs.is_cpu or probs.shape[1] <= _TOP:
        return _keep_nucleus(probs, *probs.sort(dim=1, descending=True), top_p)
    ordered, order = probs.topk(_TOP, dim=1)
    law = _keep_nucleus(probs, ordered, order, top_p)
    # row by row, so that a law does not depend on those beside it; a NaN is no mass
    if len(flat := (~(ordered.cumsum(1)[:, -1] >= top_p)).nonzero().flatten()):
        law[flat] = _keep_nucleus(probs[flat], *probs[flat].sort(dim=1, descending=True), top_p)
    return law


def _keep_nucleus(probs: Tensor, ordered: Tensor, order: Tensor, top_p: float) -> Tensor:
    """Return laws (T, V) of the likeliest tokens alone, given these and where they stand."""
    # the token that crosses the threshold is in
    outside = ordered.cumsum(1) - ordered >= top_p
    kept = probs.new_zeros(probs.shape).scatter_(1, order, ordered.masked_fill(outside, 0))
    return kept / kept.sum(1, keepdim=True)


@dataclass(frozen=True)
class PaddedSampling(Sampling):
    """The same sampling for a draft model whose vocabulary is padded otherwise than the target's.

    Its laws are over the target's `vocab`, as verification wants them: what the draft lacks has no
    probability, and what only the draft has is no candidate.
    """

    vocab: int = 0

    def probs(self, logits: Tensor) -> Tensor:
        """Return the law (T, vocab) float32 that logits (T, rows of the draft) stand for."""
        law = super().probs(logits[:, : self.vocab])
        padded = law.new_zeros(len(law), self.vocab)
        padded[:, : law.shape[1]] = law
        return padded


def draw(law: Tensor, generator: Generator) -> Tensor:
    """Draw one token (1,) from a law (V,), without waiting for the device.

    The law need not be normalised. The index of the least E_i / law_i with E_i standard exponential
    is distributed as the law; a law of one token has no noise.
    """
    # float64: float32 noise comes in steps of 2**-24, too coarse for the many tokens of a
    # vocabulary that are rarer than that
    import torch

    noise = torch.empty_like(law, dtype=torch.float64).exponential_(generator=generator)
    return exponential_race(law, noise)


def exponential_race(law: Tensor, noise: Tensor) -> Tensor:
    """Return the token (1,) whose bell rings first, at rates law (V,), with noise (V,) float64.

    The noise is standard exponential.
    """
    return (law / noise.clamp(min=sys.float_info.min)).argmax(0, keepdim=True)
