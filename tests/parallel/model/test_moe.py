"""Every variant of the mixture of experts agrees with a naive reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.config.families import Clamp, ExpertNames, Gating, MoEConfig
from parallel.model.moe import Experts, moe_by_expert, route, static_moe
from parallel.ranks.process_group import TensorParallelGroup

HIDDEN, COLUMNS = 12, 10
NORMALISED = Gating(normalised=True)
NAMES = ExpertNames("intermediate_size", "mlp.experts", "mlp.gate")
Moe = Callable[..., Tensor]


def naive_moe(x: Tensor, scores: Tensor, k: int, experts: Experts) -> Tensor:
    """Token by token, and expert by expert in order of their scores."""
    gate_up, down = experts.gate_up.whole(), experts.down.whole()
    rows = []
    for token, row in zip(x, scores, strict=True):
        best = sorted(range(len(row)), key=lambda expert: -float(row[expert]))[:k]
        probs = row[best].exp()
        outs = []
        for expert in best:
            products = gate_up[expert] @ token
            if experts.gate_up_bias is not None:
                products += experts.gate_up_bias[expert]
            gate, up = products[:COLUMNS], products[-COLUMNS:]
            if experts.shape.activation == "relu2":
                out = down[expert] @ (up * (up > 0)) ** 2
            elif (clamp := experts.shape.clamp) is None:
                out = down[expert] @ (F.silu(gate) * up)
            else:
                gate = torch.where(gate > clamp.limit, clamp.limit, gate)
                up = torch.where(up.abs() > clamp.limit, clamp.limit * up.sign(), up)
                out = down[expert] @ ((up + 1) * gate / (1 + (-clamp.alpha * gate).exp()))
            if experts.down_bias is not None:
                out += experts.down_bias[expert]
            outs.append(out)
        rows.append((probs / probs.sum()) @ torch.stack(outs))
    return torch.stack(rows)


def random_experts(count: int, kind: str) -> Experts:
    """Return experts with random weights; those with biases are clamped, as gpt-oss's."""
    shape = MoEConfig(count, 1, COLUMNS, NORMALISED, frozenset({0}), NAMES)
    if kind == "biases":
        shape = replace(shape, clamp=Clamp(1.702, 1.5), has_biases=True)
    elif kind == "no gates":
        shape = replace(shape, activation="relu2")
    experts = Experts(shape, HIDDEN, TensorParallelGroup())
    for matrix in (experts.gate_up, experts.down):
        matrix.allocate()
    for parameter in experts.parameters():
        parameter.normal_()
    return experts


@pytest.mark.parametrize("kind", ["gates", "no gates", "biases"])
@pytest.mark.parametrize("moe", [moe_by_expert, static_moe])
# The first two gather weights; in the last one some experts have no token.
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 12, 2), (2, 12, 2), (3, 12, 2), (30, 4, 2), (3, 4, 4), (4, 9, 1)],
)
def test_moe_matches_a_naive_reference(
    moe: Moe, tokens: int, experts: int, k: int, kind: str
) -> None:
    x, scores = torch.randn(tokens, HIDDEN), torch.randn(tokens, experts)
    mixture = random_experts(experts, kind)
    weights, chosen = route(scores, k, NORMALISED)
    result = moe(x, weights, chosen, mixture)
    expected = naive_moe(x, scores, k, mixture)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_a_correction_selects_experts_and_does_not_weigh_them() -> None:
    scores, correction = torch.randn(50, 6), torch.randn(6)
    for is_sigmoid in (False, True):
        gating = Gating(False, is_sigmoid, is_corrected=True, factor=2.5)
        probs = scores.sigmoid() if is_sigmoid else scores.softmax(-1)
        weights, chosen = route(scores, 2, gating, correction)
        assert torch.equal(chosen, (probs + correction).topk(2)[1])
        assert torch.equal(weights, 2.5 * probs.gather(1, chosen))
    weights, _ = route(scores - 200, 2, Gating(True, True, True, min_sum=1e-20), correction)
    assert torch.equal(weights, torch.zeros(50, 2))  # not NaN


def test_experts_are_in_the_best_groups() -> None:
    scores, correction = torch.randn(200, 12), torch.randn(12)
    gating = Gating(True, True, True, groups=4, groups_per_token=2, min_sum=1e-20)
    chosen = route(scores, 3, gating, correction)[1]
    for row, experts in zip(scores.sigmoid() + correction, chosen, strict=True):
        groups = [sum(sorted(row[first : first + 3].tolist())[1:]) for first in range(0, 12, 3)]
        best = sorted(range(4), key=groups.__getitem__)[2:]
        allowed = [expert for expert in range(12) if expert // 3 in best]
        expected = sorted(allowed, key=lambda expert: -float(row[expert]))[:3]
        assert experts.tolist() == expected


def test_router_weights_sum_to_one_only_if_normalised() -> None:
    scores = torch.randn(5, 6)
    weights, chosen = route(scores, 2, Gating(normalised=False))
    assert torch.equal(weights, scores.softmax(-1).gather(1, chosen))
    torch.testing.assert_close(route(scores, 2, NORMALISED)[0].sum(-1), torch.ones(5))
