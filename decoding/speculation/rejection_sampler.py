"""Speculative rejection sampling: the output follows the target's distribution for any draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from decoding.speculation.sampling import draw
from offload.errors import InvalidRequestError


@dataclass(frozen=True)
class Draft:
    """Draft tokens, and the distributions they were sampled from."""

    tokens: Tensor  # (N,) int64
    probs: Tensor  # (N, V) float32; row i is the exact distribution tokens[i] was sampled from

    def split(self, count: int) -> tuple[Draft, Draft]:
        """Return the first `count` tokens and the rest, as views."""
        first = Draft(self.tokens[:count], self.probs[:count])
        return first, Draft(self.tokens[count:], self.probs[count:])


def concatenated(drafts: Sequence[Draft]) -> Draft:
    """Return drafts that follow each other as one."""
    if len(drafts) == 1:
        return drafts[0]
    tokens, probs = zip(*((each.tokens, each.probs) for each in drafts), strict=True)
    return Draft(torch.cat(tokens), torch.cat(probs))


def rejection_sample(draft: Draft, target_probs: Tensor, generator: Generator) -> tuple[int, int]:
    """Accept a prefix of the draft and sample one more token, exactly as the target would.

    Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1. target_probs is (N + 1, V): row i follows
    i accepted tokens. Returns the number of accepted tokens, and the recovered or bonus token, with
    one device synchronization. Raises InvalidRequestError when a distribution it needs is NaN.
    """
    n = len(draft.tokens)
    if n == 0:
        probs = target_probs[0]
        (token,) = to_host(draw(probs, generator), probs)
        return 0, token
    tokens = draft.tokens[:, None]
    p = target_probs[:n].gather(1, tokens)  # (N, 1)
    q = draft.probs.gather(1, tokens)  # (N, 1)
    is_accepted = torch.rand(n, 1, generator=generator, device=p.device) * q < p
    accepted = is_accepted.cumprod(0).sum(0)  # (1,)
    probs = target_probs.index_select(0, accepted)[0]  # (V,)
    draft_probs = draft.probs.index_select(0, accepted.clamp(max=n - 1))[0]
    # the bonus token after a fully accepted draft is sampled from the target, not a residual
    draft_probs = torch.where(accepted < n, draft_probs, 0.0)
    next_token = draw(residual_probs(probs, draft_probs), generator)
    count, token = to_host(torch.cat((accepted, next_token)), probs, draft_probs)
    return count, token


def to_host(integers: Tensor, *distributions: Tensor) -> list[int]:
    """Return integers (N,) from the device, with one synchronization.

    The first of `distributions` is the target's, the optional second the draft's. Raises
    InvalidRequestError when one has a NaN, which the same synchronization finds out.
    """
    # one NaN makes the whole sum NaN
    is_finite = torch.stack([probs.sum() for probs in distributions]).isfinite()
    values = torch.cat((integers, is_finite.to(integers.dtype))).tolist()
    target_is_finite, *others = values[len(integers) :]
    if not all((target_is_finite, *others)):
        raise overflow_error(
            "a draft was sampled from" if target_is_finite else "the model computed"
        )
    return values[: len(integers)]


def overflow_error(source: str) -> InvalidRequestError:
    """Return the error for a NaN in the logits that `source`."""
    return InvalidRequestError(
        f"NaN in the logits that {source}: the weights, or this request's activations, overflow in "
        "this dtype."
    )


def residual_probs(p: Tensor, q: Tensor) -> Tensor:
    """Return the residual distribution norm(max(0, p - q)) (V,), unnormalized.

    The recovered token, which replaces a rejected one, is sampled from it.
    """
    residual = (p - q).clamp(min=0)
    return torch.where(residual.any(), residual, p)  # p == q up to rounding
