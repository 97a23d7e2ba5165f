"""Sparse mixture of experts: a router sends each token to a few of many MLPs.

Every rank holds its intermediate columns of all experts. So ranks have equal work whichever experts
are selected, and the output takes one all-reduce, as in a dense MLP.

Source: Shazeer et al. 2017, arXiv 1701.06538; the router as in Mixtral, arXiv 2401.04088.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.batch_invariant import map_rows
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import MAX_STATIC_TOKENS
from parallel.formats.checkpoint import Checkpoint
from parallel.model.residual import Branch
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.expert_matrix import ExpertMatrix
from parallel.weights.matmul import linear
from parallel.weights.matrix import empty_parameter
from parallel.weights.packed import Slice
from parallel.weights.routing import Routing


class SparseMoE(Branch):
    """A layer's gated MLPs (experts), and the router that selects among them for each token.

    The router is replicated. All ranks apply it to the same x, so they select the same experts.
    """

    def __init__(self, config: ModelConfig, group: TensorParallelGroup):
        super().__init__(config, config.norms.mlp)
        assert config.experts is not None
        self.shape = config.experts
        self.group = group
        self.share = group.share(self.shape.intermediate)
        columns = self.share.stop - self.share.start
        count, hidden = self.shape.count, config.hidden
        self.router = empty_parameter(count, hidden)
        self.gate_up = ExpertMatrix(count, 2 * columns, hidden)
        self.down = ExpertMatrix(count, hidden, columns)

    def forward(self, x: Tensor) -> AsyncSum:
        """Transform x (T, hidden); return a pending all-reduce (T, hidden)."""
        # Row by row if batch-invariant: an expert's number of rows depends on all tokens.
        partial = map_rows(self._expert_sum, self.pre(x))
        return self.post(self.group.start_all_reduce(partial))

    def _expert_sum(self, x: Tensor) -> Tensor:
        """Return this rank's partial sum (T, hidden) of the experts' outputs for x (T, hidden)."""
        scores = linear(x, self.router)
        weights, chosen = route(scores, self.shape.per_token, self.shape.normalised)
        # On a GPU a short forward may be captured, and the host must not wait for the routing.
        is_static = self.group.device.type == "cuda" and len(x) <= MAX_STATIC_TOKENS
        moe = static_moe if is_static else moe_by_expert
        return moe(x, weights, chosen, self.gate_up, self.down)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        names = self.shape.names
        block = f"{prefix}.{names.block}"
        count, hidden = self.router.shape
        wide, tall = (self.shape.intermediate, hidden), (hidden, self.shape.intermediate)
        self.router.copy_(checkpoint.tensor(f"{block}.gate.weight", (count, hidden))[:])
        gate_up: list[Slice] = []
        down: list[Slice] = []
        for index in range(count):
            expert = f"{block}.experts.{index}"
            for name in (names.gate, names.up):
                tensor = checkpoint.tensor(f"{expert}.{name}.weight", wide)
                gate_up.append(Slice(tensor, self.share, slice(0, hidden)))
            tensor = checkpoint.tensor(f"{expert}.{names.down}.weight", tall)
            down.append(Slice(tensor, slice(0, hidden), self.share))
        self.gate_up.load(gate_up)
        self.down.load(down)


def route(scores: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the weights (T, per_token) float32 of each token's experts, and the experts' indices.

    scores (T, experts) are the router's logits. `normalised` weights sum to 1.
    """
    probs = scores.softmax(-1, dtype=torch.float32)
    weights, chosen = probs.topk(per_token, dim=-1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def moe_by_expert(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: ExpertMatrix, down: ExpertMatrix
) -> Tensor:
    """Return the weighted sum (T, hidden) of each token's experts, expert by expert.

    Only selected experts are read and computed. The host synchronizes to learn the number of tokens
    of each expert. x (T, hidden), matrices (2 I, hidden) and (hidden, I) of each expert.
    """
    per_token = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows = order // per_token
    scales = weights.flatten()[order]
    counts = flat.bincount(minlength=down.experts).tolist()
    out = torch.zeros_like(x)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        own = rows[start : start + count]
        scale = scales[start : start + count, None]
        gate, up = linear(x[own], gate_up.of(expert)).chunk(2, dim=-1)
        y = linear(F.silu(gate) * up, down.of(expert))
        out.index_add_(0, own, (y * scale).to(x.dtype))
        start += count
    return out


def static_moe(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: ExpertMatrix, down: ExpertMatrix
) -> Tensor:
    """Return the result of `moe_by_expert`, with launches that do not depend on the routing.

    If experts are packed, each token is multiplied with its own (`ExpertMatrix.products`).
    Otherwise, for few tokens their experts' weights are gathered, which writes and reads them once
    more. More tokens, which need most experts anyway, go through all of them; unselected ones have
    weight 0.
    """
    tokens, per_token = chosen.shape
    flat = chosen.flatten()
    if gate_up.packed is not None or down.packed is not None:
        routing = Routing.of(flat, down.experts)
        gate, up = gate_up.products(x, routing, per_token).chunk(2, dim=-1)
        y = down.products(F.silu(gate) * up, routing, 1)
        return _weighted(y.view(tokens, per_token, -1), weights[..., None], 1)
    if 3 * tokens * per_token <= down.experts:
        rows = x.repeat_interleave(per_token, dim=0)[:, None]  # (T * per_token, 1, hidden)
        y = _expert_mlps(rows, gate_up.whole()[flat], down.whole()[flat])
        return _weighted(y.view(tokens, per_token, -1), weights[..., None], 1)
    scales = weights.new_zeros(tokens, down.experts).scatter(1, chosen, weights)
    repeated = x.expand(down.experts, -1, -1)  # (E, T, hidden)
    y = _expert_mlps(repeated, gate_up.whole(), down.whole())
    return _weighted(y, scales.t()[..., None], 0)


def _expert_mlps(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the outputs (B, T, hidden) of B MLPs, each with its own weights and x (T, hidden)."""
    gate, up = torch.bmm(x, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    return torch.bmm(F.silu(gate) * up, down.transpose(1, 2))


def _weighted(y: Tensor, scales: Tensor, dim: int) -> Tensor:
    return (y * scales).sum(dim).to(y.dtype)
