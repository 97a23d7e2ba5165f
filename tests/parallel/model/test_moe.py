"""Every variant of the mixture of experts agrees with a naive reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.model.moe import moe_by_expert, route, static_moe
from parallel.weights.expert_matrix import ExpertMatrix

HIDDEN, COLUMNS = 12, 10
Moe = Callable[..., Tensor]


def naive_moe(x: Tensor, scores: Tensor, k: int, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, and expert by expert in order of their scores."""
    rows = []
    for token, row in zip(x, scores, strict=True):
        best = sorted(range(len(row)), key=lambda expert: -float(row[expert]))[:k]
        probs = row[best].exp()
        outs = []
        for expert in best:
            gate, up = (gate_up[expert] @ token).split(COLUMNS)
            outs.append(down[expert] @ (F.silu(gate) * up))
        rows.append((probs / probs.sum()) @ torch.stack(outs))
    return torch.stack(rows)


def stacked(weights: Tensor) -> ExpertMatrix:
    """Return experts' weights (E, rows, columns) as a matrix."""
    matrix = ExpertMatrix(*weights.shape)
    matrix.allocate().copy_(weights.flatten(0, 1))
    return matrix


@pytest.mark.parametrize("moe", [moe_by_expert, static_moe])
# The first two gather weights; in the last one some experts have no token.
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 12, 2), (2, 12, 2), (3, 12, 2), (30, 4, 2), (3, 4, 4), (4, 9, 1)],
)
def test_moe_matches_a_naive_reference(moe: Moe, tokens: int, experts: int, k: int) -> None:
    x, scores = torch.randn(tokens, HIDDEN), torch.randn(tokens, experts)
    gate_up = torch.randn(experts, 2 * COLUMNS, HIDDEN)
    down = torch.randn(experts, HIDDEN, COLUMNS)
    weights, chosen = route(scores, k, normalised=True)
    result = moe(x, weights, chosen, stacked(gate_up), stacked(down))
    expected = naive_moe(x, scores, k, gate_up, down)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_router_weights_sum_to_one_only_if_normalised() -> None:
    scores = torch.randn(5, 6)
    weights, chosen = route(scores, 2, normalised=False)
    assert torch.equal(weights, scores.softmax(-1).gather(1, chosen))
    torch.testing.assert_close(route(scores, 2, normalised=True)[0].sum(-1), torch.ones(5))
