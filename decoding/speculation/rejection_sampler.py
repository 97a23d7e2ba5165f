"""Exact speculative verification: the law that comes out is the target's, whatever was proposed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from decoding.speculation.sampling import draw
from offload.errors import InvalidRequestError


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the laws they were drawn from."""

    tokens: Tensor  # (N,) int64
    probs: Tensor  # (N, V) float32; row i is the exact law tokens[i] was drawn from


def rejection_sample(draft: Draft, target_probs: Tensor, generator: Generator) -> tuple[int, int]:
    """Accept a prefix of the draft and draw one more token, leaving the target's law unchanged.

    Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1. target_probs is (N + 1, V): row i is the
    target's law after i accepted tokens. Returns how many tokens stand, and the token that follows
    them, after one wait for the device. Raises InvalidRequestError when a law it needs is NaN.
    """
    n = len(draft.tokens)
    if n == 0:
        law = target_probs[0]
        (token,) = to_host(draw(law, generator), law)
        return 0, token
    tokens = draft.tokens[:, None]
    p = target_probs[:n].gather(1, tokens)  # (N, 1)
    q = draft.probs.gather(1, tokens)  # (N, 1)
    stands = torch.rand(n, 1, generator=generator, device=p.device) * q < p
    accepted = stands.cumprod(0).sum(0)  # (1,)
    law = target_probs.index_select(0, accepted)[0]  # (V,)
    proposed = draft.probs.index_select(0, accepted.clamp(max=n - 1))[0]
    # nothing is taken off where all of the draft stands
    proposed = torch.where(accepted < n, proposed, 0.0)
    following = draw(residual_probs(law, proposed), generator)
    stood, token = to_host(torch.cat((accepted, following)), law, proposed)
    return stood, token


def to_host(numbers: Tensor, *laws: Tensor) -> list[int]:
    """Return whole numbers (N,) from the device, after one wait.

    The first of the laws is the model's own, the other one that of the level which drafted.
    Raises InvalidRequestError where one is not made of numbers, as the same wait tells.
    """
    # a sum with a NaN in it is one
    good = torch.stack([law.sum() for law in laws]).isfinite()
    values = torch.cat((numbers, good.to(numbers.dtype))).tolist()
    own, *others = values[len(numbers) :]
    if not all((own, *others)):
        whose = "a draft was drawn from" if own else "the model computed"
        raise InvalidRequestError(
            f"the logits that {whose} are not numbers (NaN): weights, or this text in their dtype, "
            "overflow."
        )
    return values[: len(numbers)]


def residual_probs(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p - q)) (V,), up to its scale: what a rejected token is redrawn from."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.any(), rest, p)  # p == q up to rounding
