"""Attention to latents through heads' own keys and values, in parts of the tokens."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from offload.attention import expanded_latents as module
from offload.attention import partial_attention
from offload.attention.expanded_latents import attend_expanded
from offload.traffic import ByteCounters

HEADS, OWN, LATENT = 3, 8, 20


class Heads:
    """Heads whose keys and values are random projections of whole latents."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, HEADS, OWN, LATENT, generator=generator)
        self.expanded: list[int] = []

    def keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        self.expanded.append(len(latents))
        keys, values = (
            torch.einsum("nl,hdl->nhd", latents, each.to(latents.dtype))
            for each in (self.keys, self.values)
        )
        return keys, values

    def latent_queries(self, q: Tensor) -> Tensor:
        return torch.einsum("thd,hdl->thl", q, self.keys) * sqrt(LATENT / OWN)


@pytest.mark.parametrize(
    ("tokens", "rows", "parts"),
    [
        (40, 40, [40]),
        (40, 5, [16, 16, 8]),
        (48, 16, [16, 16, 16]),
        (53, 5, [16, 16, 16, 5]),
        (64, 20, [16, 16, 32]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_attention_to_latents(
    tokens: int, rows: int, parts: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPANDED_TOKENS", 16)
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(tokens, LATENT, generator=generator).to(dtype)
    q = torch.randn(rows, HEADS, OWN, generator=generator).to(dtype)
    heads, traffic = Heads(), ByteCounters()
    out, lse = attend_expanded(kv, q, heads, traffic)

    queries = heads.latent_queries(q.float())
    attended, expected_lse = partial_attention(queries, *2 * [kv.float()[:, None]], causal=True)
    expected = torch.einsum("thl,hdl->thd", attended, heads.values)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    assert out.dtype == dtype
    assert heads.expanded == parts
    assert traffic.attended == 2 * kv.nbytes
