"""Exact speculative verification: the law that comes out is the target's, whatever was proposed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from decoding.sampling import draw
from offload import DocumentError


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and where they came from."""

    tokens: Tensor  # (N,) int64
    probs: Tensor  # (N, V) float32; row i is the exact law tokens[i] was drawn from


def verify(draft: Draft, target_probs: Tensor, generator: Generator) -> tuple[int, int]:
    """Accept a prefix of the draft and draw one more token, leaving the target's law unchanged.

    Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1. target_probs is (N + 1, V): row i is the target's law after i accepted
    tokens. Returns how many tokens stand, and the token that follows them. Raises DocumentError when a law it needs is NaN.
    """
    n = len(draft.tokens)
    p = target_probs[:n].gather(1, draft.tokens[:, None]).squeeze(1)  # (N,)
    q = draft.probs.gather(1, draft.tokens[:, None]).squeeze(1)  # (N,)
    stands = torch.rand(n, generator=generator, device=p.device) * q < p
    accepted = int(stands.cumprod(0).sum())
    law = finite(target_probs[accepted])
    if accepted < n:
        law = residual(law, finite(draft.probs[accepted]))
    return accepted, int(draw(law, generator))


def finite(law: Tensor) -> Tensor:
    """The law itself. Raises DocumentError when it is not made of numbers."""
    if not bool(law.isfinite().all()):
        raise DocumentError("a model's logits are not numbers (NaN): its weights, or this text in its dtype, overflow.")
    return law


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)), up to its scale: what a rejected token is redrawn from, (V,)."""
    rest = (p - q).clamp(min=0)
    return rest if bool(rest.any()) else p  # p == q up to rounding
