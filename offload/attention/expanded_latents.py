"""Attention of a prompt's many rows to latents, through the heads' own keys and values.

A forward of few rows attends to latents as they are, which takes no memory and more operations than
heads' own keys and values would. From some hundred rows on computing these costs less than it
saves, and their dimensions are those that flash kernels support.

Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from offload.attention import partial_attention
from offload.attention.folding import Partial, merge
from offload.layout import EXPANDED_TOKENS
from offload.traffic import ByteCounters


class LatentHeads(Protocol):
    """A layer's heads: what tokens' latents are to them."""

    def keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (N, H, D) of a prompt's tokens, whose latents are (N, Dl)."""
        ...

    def latent_queries(self, q: Tensor) -> Tensor:
        """Return what queries (T, H, D) of keys are as queries (T, H, Dl) of latents."""
        ...


def attend_expanded(
    latents: Tensor, q: Tensor, heads: LatentHeads, traffic: ByteCounters
) -> Partial:
    """Return the causal attention of q (T, H, D), the last T tokens of latents (N, Dl).

    Keys and values are computed for a part of the tokens at a time. Queries and latents are
    rotated. The bytes of latents are counted in `traffic` as those of keys, and of values.
    """
    traffic.attended += 2 * latents.nbytes
    tokens, rows = len(latents), len(q)
    total: Partial | None = None
    start = 0
    while start < tokens:
        # the queries' own tokens are in the last part
        end = start + EXPANDED_TOKENS
        is_last = end > tokens - rows
        part = latents[start : tokens if is_last else end]
        out, lse = partial_attention(q, *heads.keys_and_values(part), causal=is_last)
        # in float32, so that the sum is rounded once
        attended = out.float(), lse
        total = attended if total is None else merge([total, attended])
        start += len(part)
    assert total is not None
    out, lse = total
    return out.to(q.dtype), lse
