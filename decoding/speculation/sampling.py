"""From logits to the law a token is drawn from, and drawing from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from decoding.config.sampling_params import SamplingOptions

_LIKELIEST = 1024  # tokens of a vocabulary that hold the mass of nearly every law


class Sampling(SamplingOptions):
    """The law that every level draws from: logits, warped by the options."""

    def over(self, vocab: int) -> PaddedSampling:
        """Return the same sampling for a model that has more or fewer tokens than `vocab`."""
        return PaddedSampling(**asdict(self), vocab=vocab)

    def law(self, logits: Tensor) -> Tensor:
        """Return the law (T, V) float32 that logits (T, V) stand for.

        A row with a NaN stays NaN, for `verify` to find. Temperature comes first, then top-k, then
        top-p: the smallest set of tokens whose mass reaches top_p (Holtzman et al. 2019).
        """
        if self.temperature == 0:
            greedy = torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
            return greedy.masked_fill_(logits.isnan().any(1, keepdim=True), torch.nan)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k, dim=1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probs = logits.softmax(1)
        return probs if self.top_p == 1 else nucleus(probs, self.top_p)


GREEDY = Sampling(temperature=0)  # the likeliest token is taken


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Return laws (T, V) cut to the fewest likeliest tokens whose mass reaches top_p.

    Where waiting for the device costs nothing, the likeliest tokens are looked at first: to sort a
    whole vocabulary takes a CPU longer than all else that drawing needs.
    """
    if not probs.is_cpu or probs.shape[1] <= _LIKELIEST:
        return _cut(probs, *probs.sort(dim=1, descending=True), top_p)
    ordered, order = probs.topk(_LIKELIEST, dim=1)
    law = _cut(probs, ordered, order, top_p)
    # row by row, so that a law does not depend on those beside it; a NaN is no mass
    if len(flat := (~(ordered.cumsum(1)[:, -1] >= top_p)).nonzero().flatten()):
        law[flat] = _cut(probs[flat], *probs[flat].sort(dim=1, descending=True), top_p)
    return law


def _cut(probs: Tensor, ordered: Tensor, order: Tensor, top_p: float) -> Tensor:
    """Return laws (T, V) of the likeliest tokens alone, given these and where they stand."""
    # the token that crosses the threshold is in
    outside = ordered.cumsum(1) - ordered >= top_p
    kept = torch.zeros_like(probs).scatter_(1, order, ordered.masked_fill(outside, 0))
    return kept / kept.sum(1, keepdim=True)


@dataclass(frozen=True)
class PaddedSampling(Sampling):
    """The same sampling for a draft model whose vocabulary is padded otherwise than the target's.

    Its laws are over the target's `vocab`, as verification wants them: what the draft lacks has no
    probability, and what only the draft has is no candidate.
    """

    vocab: int = 0

    def law(self, logits: Tensor) -> Tensor:
        """Return the law (T, vocab) float32 that logits (T, rows of the draft) stand for."""
        law = super().law(logits[:, : self.vocab])
        return F.pad(law, (0, self.vocab - law.shape[1]))


def draw(law: Tensor, generator: Generator) -> Tensor:
    """Draw one token (1,) from a law (V,), without waiting for the device.

    The law need not be normalised. The index of the least E_i / law_i with E_i standard exponential
    is distributed as the law; a law of one token has no noise.
    """
    # float64: float32 noise comes in steps of 2**-24, too coarse for the many tokens of a
    # vocabulary that are rarer than that
    noise = torch.empty_like(law, dtype=torch.float64).exponential_(generator=generator)
    return first_to_ring(law, noise)


def first_to_ring(law: Tensor, noise: Tensor) -> Tensor:
    """Return the token (1,) whose bell rings first, at rates law (V,), with noise (V,) float64.

    The noise is standard exponential.
    """
    return (law / noise.clamp(min=torch.finfo(torch.float64).tiny)).argmax(0, keepdim=True)
