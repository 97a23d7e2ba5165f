"""Experts are mixed as by hand, whichever way they are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.moe import moe_by_expert, route, static_moe

HIDDEN, COLUMNS = 12, 10
Mix = Callable[..., Tensor]


def by_hand(x: Tensor, scores: Tensor, k: int, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, and expert by expert in order of their scores."""
    rows = []
    for token, row in zip(x, scores, strict=True):
        best = sorted(range(len(row)), key=lambda expert: -float(row[expert]))[:k]
        law = row[best].exp()
        outs = []
        for expert in best:
            both = gate_up[expert] @ token
            outs.append(down[expert] @ (F.silu(both[:COLUMNS]) * both[COLUMNS:]))
        rows.append((law / law.sum()) @ torch.stack(outs))
    return torch.stack(rows)


@pytest.mark.parametrize("mix", [moe_by_expert, static_moe])
# of the first two, weights are gathered; of the last, some experts have no token
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 12, 2), (2, 12, 2), (3, 12, 2), (30, 4, 2), (3, 4, 4), (4, 9, 1)],
)
def test_experts_are_mixed_as_by_hand(mix: Mix, tokens: int, experts: int, k: int) -> None:
    x, scores = torch.randn(tokens, HIDDEN), torch.randn(tokens, experts)
    gate_up = torch.randn(experts, 2 * COLUMNS, HIDDEN)
    down = torch.randn(experts, HIDDEN, COLUMNS)
    weights, chosen = route(scores, k, normalised=True)
    mixed = mix(x, weights, chosen, gate_up, down)
    wanted = by_hand(x, scores, k, gate_up, down)
    torch.testing.assert_close(mixed, wanted, atol=1e-4, rtol=1e-4)


def test_weights_are_shares_of_all_experts_unless_they_are_normalised() -> None:
    scores = torch.randn(5, 6)
    weights, chosen = route(scores, 2, normalised=False)
    assert torch.equal(weights, scores.softmax(-1).gather(1, chosen))
    torch.testing.assert_close(route(scores, 2, normalised=True)[0].sum(-1), torch.ones(5))
