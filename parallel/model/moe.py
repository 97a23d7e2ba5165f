"""Sparse mixture of experts: a router sends each token to a few of many MLPs.

Every rank holds its intermediate columns of all experts. So ranks have equal work whichever experts
are selected, and the output takes one all-reduce, as in a dense MLP.

Source: Shazeer et al. 2017, arXiv 1701.06538; the router as in Mixtral, arXiv 2401.04088.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from parallel.batch_invariant import map_blocks, map_rows
from parallel.config.families import BranchNorms, Gating, MoEConfig
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import MAX_STATIC_TOKENS
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear, unweighted_norm
from parallel.model.residual import ACTIVATIONS, Branch, Mlp, sigmoid_gated
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.expert_matrix import ExpertMatrix
from parallel.weights.matmul import linear
from parallel.weights.matrix import empty_parameter
from parallel.weights.packed import Slice
from parallel.weights.routing import Routing


class Experts(Module):
    """The MLPs of a layer, with or without gates: this rank's intermediate columns of each."""

    def __init__(self, shape: MoEConfig, hidden: int, group: TensorParallelGroup):
        super().__init__()
        self.shape, self.hidden = shape, hidden
        self.share = group.share(shape.intermediate)
        columns = self.share.stop - self.share.start
        self.names = (shape.names.gate, shape.names.up)[-shape.inputs :]
        self.gate_up = ExpertMatrix(shape.count, shape.inputs * columns, hidden)
        self.down = ExpertMatrix(shape.count, hidden, columns)
        self.gate_up_bias: Parameter | None = None
        self.down_bias: Parameter | None = None  # zero on all ranks but the first: it is summed
        self.has_down_bias = group.rank == 0
        if shape.has_biases:
            self.gate_up_bias = empty_parameter(shape.count, shape.inputs * columns)
            self.down_bias = empty_parameter(shape.count, hidden)

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return the activations (..., columns) of products, of which gates come first.

        The products may be overwritten.
        """
        if (clamp := self.shape.clamp) is None:
            return ACTIVATIONS[self.shape.activation](*gate_up.chunk(self.shape.inputs, dim=-1))
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=clamp.limit)
        up.clamp_(-clamp.limit, clamp.limit).add_(1)
        return torch.sigmoid_(gate * clamp.alpha).mul_(gate).mul_(up)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the tensors PREFIX.{expert}.{name}.weight, and .bias."""
        gate_up: list[Slice] = []
        down: list[Slice] = []
        for index in range(self.shape.count):
            self._add_expert(checkpoint, f"{prefix}.{index}", index, gate_up, down)
        self.gate_up.load(gate_up)
        self.down.load(down)

    def _add_expert(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        index: int,
        gate_up: list[Slice],
        down: list[Slice],
    ) -> None:
        """Add an expert's slices to those to be loaded, and load its biases."""
        size, hidden, names = self.shape.intermediate, self.hidden, self.shape.names
        biases = []
        for name in self.names:
            tensor = checkpoint.tensor(f"{prefix}.{name}.weight", (size, hidden))
            gate_up.append(Slice(tensor, self.share, slice(0, hidden)))
            if self.shape.has_biases:
                biases.append(checkpoint.tensor(f"{prefix}.{name}.bias", (size,))[self.share])
        tensor = checkpoint.tensor(f"{prefix}.{names.down}.weight", (hidden, size))
        down.append(Slice(tensor, slice(0, hidden), self.share))
        if self.gate_up_bias is not None and self.down_bias is not None:
            bias = checkpoint.tensor(f"{prefix}.{names.down}.bias", (hidden,))
            self.gate_up_bias[index].copy_(torch.cat(biases))
            self.down_bias[index].copy_(bias[:] if self.has_down_bias else torch.zeros(hidden))


class Router(Module):
    """Selects a few of a layer's experts for each token.

    It is replicated: all ranks apply it to the same x, so they select the same experts. In Gemma 4
    it normalises x, and scales this and the weights of experts (transformers, modeling_gemma4.py).
    Those of ERNIE, GLM and DeepSeek are in float32 (transformers, modeling_deepseek_v3.py).
    """

    def __init__(self, shape: MoEConfig, hidden: int, eps: float):
        super().__init__()
        self.shape, self.eps = shape, eps
        self.in_float32 = shape.gating.in_float32
        self.weight = empty_parameter(shape.count, hidden)
        self.correction = empty_parameter(shape.count) if shape.gating.is_corrected else None
        self.bias = empty_parameter(shape.count) if shape.has_biases else None
        self.scale = empty_parameter(hidden) if shape.is_gemma4 else None
        self.expert_scale = empty_parameter(shape.count) if shape.is_gemma4 else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (T, per_token) float32 of the experts of x (T, hidden), and these."""
        if self.scale is not None:
            x = unweighted_norm(x, x.shape[-1], self.eps) * self.scale * x.shape[-1] ** -0.5
        scores = linear(x.to(self.weight.dtype), self.weight, self.bias)
        weights, chosen = route(scores, self.shape.per_token, self.shape.gating, self.correction)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        return weights, chosen

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the tensors of layer PREFIX: weight and bias, or Gemma 4's weight and scales."""
        names = self.shape.names
        name = f"{prefix}.{names.router}"
        count, hidden = shape = tuple(self.weight.shape)
        if self.scale is not None and self.expert_scale is not None:
            self.scale.copy_(checkpoint.tensor(f"{name}.scale", (hidden,))[:])
            scales = checkpoint.tensor(f"{name}.per_expert_scale", (count,))
            self.expert_scale.copy_(scales[:])
            name = f"{name}.proj"
        self.weight.copy_(checkpoint.tensor(f"{name}.weight", shape)[:])
        if self.bias is not None:
            self.bias.copy_(checkpoint.tensor(f"{name}.bias", (count,))[:])
        if self.correction is not None:
            dims = () if checkpoint.is_converted else names.correction_dims
            correction = checkpoint.tensor(f"{prefix}.{names.correction}", (*dims, count))
            self.correction.copy_(correction[:].flatten())


class SparseMoE(Branch):
    """A layer's experts, and the router that selects among them for each token."""

    def __init__(
        self, config: ModelConfig, group: TensorParallelGroup, norms: BranchNorms | None = None
    ):
        """`norms`: names of its own, if they are not the model's."""
        super().__init__(config, norms or config.norms.mlp)
        assert config.experts is not None
        self.shape = config.experts
        self.group = group
        self.router = Router(self.shape, config.hidden, config.norm_eps)
        self.experts = Experts(self.shape, config.hidden, group)
        self.shared: SharedExpert | None = None
        if self.shape.shared is not None:
            self.shared = SharedExpert(config.hidden, self.shape, group)

    def forward(self, x: Tensor) -> AsyncSum:
        """Transform x (T, hidden); return a pending all-reduce (T, hidden)."""
        normed = self.pre(x)
        routed = x if self.shape.is_gemma4 else normed  # input of the router
        # Row by row if batch-invariant: an expert's number of rows depends on all tokens.
        partial = map_rows(self._expert_sum, normed, routed)
        if self.shared is not None:
            partial = partial + self.shared(normed)
        return self.post(self.group.start_all_reduce(partial))

    def _expert_sum(self, x: Tensor, routed: Tensor) -> Tensor:
        """Return this rank's partial sum (T, hidden) of the experts' outputs for x (T, hidden)."""
        weights, chosen = self.router(routed)
        # On a GPU a short forward may be captured, and the host must not wait for the routing.
        is_static = self.group.device.type == "cuda" and len(x) <= MAX_STATIC_TOKENS
        moe = static_moe if is_static else moe_by_expert
        return moe(x, weights, chosen, self.experts)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        self.router.load(checkpoint, prefix)
        self.experts.load(checkpoint, f"{prefix}.{self.shape.names.experts}")
        if self.shared is not None:
            self.shared.load(checkpoint, prefix)


class SharedExpert(Module):
    """One more expert, which all tokens are sent to; in Qwen's models its output has a gate.

    Several such experts are one whose intermediate dimensions are those of all. Source: Dai et al.
    2024, DeepSeekMoE, arXiv 2401.06066, section 3.2; transformers, modeling_qwen3_next.py.
    """

    def __init__(self, hidden: int, shape: MoEConfig, group: TensorParallelGroup):
        super().__init__()
        assert shape.shared is not None
        self.names = shape.names
        self.activate = ACTIVATIONS[shape.activation]
        outputs = [shape.shared] * shape.inputs
        self.gate_up = ColumnParallelLinear(group, hidden, outputs, False)
        self.down = RowParallelLinear(group, shape.shared, hidden, False)
        self.gate = None if self.names.shared_gate is None else empty_parameter(1, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's partial sum (T, hidden) of the expert's output for x (T, hidden)."""
        partial = self.down.weight.product(map_blocks(self.activate, *self.gate_up(x)))
        if self.gate is None:
            return partial
        return map_blocks(sigmoid_gated, partial, linear(x, self.gate))

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the tensors of layer PREFIX: those of an MLP, and a gate if it has one."""
        names = self.names.shared
        self.gate_up.load(checkpoint, names.inputs(prefix, checkpoint))
        self.down.load(checkpoint, f"{prefix}.{names.block}.{names.down}")
        if self.gate is not None:
            name = f"{prefix}.{self.names.shared_gate}.weight"
            shape = tuple(self.gate.shape)[int(checkpoint.is_converted) :]
            self.gate.copy_(checkpoint.tensor(name, shape)[:])


class MlpAndExperts(Branch):
    """A dense MLP and experts with the same input, each with norms of its own, as in Gemma 4."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup):
        before, after = config.norms.mlp
        super().__init__(config, (None, after))
        self.mlp = Mlp(config, group, (before, f"{after}_1"))
        self.moe = SparseMoE(config, group, (f"{before}_2", f"{after}_2"))

    def forward(self, x: Tensor) -> AsyncSum:
        """Transform x (T, hidden); return two pending all-reduces as one (T, hidden)."""
        dense, sparse = self.mlp(x), self.moe(x)
        return self.post(lambda: dense() + sparse())

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        self.mlp.load(checkpoint, prefix)
        self.moe.load(checkpoint, prefix)


def route(
    scores: Tensor, per_token: int, gating: Gating, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights (T, per_token) float32 of each token's experts, and the experts' indices.

    scores (T, experts) are the router's logits, correction (experts,) is added to probabilities.
    """
    probs = scores.sigmoid() if gating.is_sigmoid else scores.softmax(-1, dtype=torch.float32)
    if correction is None:
        weights, chosen = probs.topk(per_token, dim=-1)
    else:
        wanted = probs + correction
        if gating.groups > 1:
            wanted = _in_best_groups(wanted, gating)
        chosen = wanted.topk(per_token, dim=-1)[1]
        weights = probs.gather(-1, chosen)
    if gating.normalised:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=gating.min_sum) if gating.min_sum else total)
    return (weights if gating.factor == 1.0 else weights * gating.factor), chosen


def _in_best_groups(wanted: Tensor, gating: Gating) -> Tensor:
    """Return wanted (T, experts), with -inf for experts that are not in a token's best groups."""
    by_group = wanted.unflatten(-1, (gating.groups, -1))
    quality = by_group.topk(2, dim=-1)[0].sum(-1)  # (T, groups)
    best = quality.topk(gating.groups_per_token, dim=-1)[1]
    is_best = torch.zeros_like(quality, dtype=torch.bool).scatter_(-1, best, True)
    return by_group.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)


def moe_by_expert(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Return the weighted sum (T, hidden) of each token's experts, expert by expert.

    Only selected experts are read and computed. The host synchronizes to learn the number of tokens
    of each expert.
    """
    per_token = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows = order // per_token
    scales = weights.flatten()[order]
    counts = flat.bincount(minlength=experts.shape.count).tolist()
    out = torch.zeros_like(x)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        own = rows[start : start + count]
        scale = scales[start : start + count, None]
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert]
            for bias in (experts.gate_up_bias, experts.down_bias)
        )
        hidden = experts.gated(linear(x[own], experts.gate_up.of(expert), gate_up_bias))
        y = linear(hidden, experts.down.of(expert), down_bias)
        out.index_add_(0, own, (y * scale).to(x.dtype))
        start += count
    return out


def static_moe(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Return the result of `moe_by_expert`, with launches that do not depend on the routing.

    If experts are packed, each token is multiplied with its own (`ExpertMatrix.products`).
    Otherwise, for few tokens their experts' weights are gathered, which writes and reads them once
    more. More tokens, which need most experts anyway, go through all of them; unselected ones have
    weight 0.
    """
    tokens, per_token = chosen.shape
    flat, count = chosen.flatten(), experts.shape.count
    gate_up, down = experts.gate_up, experts.down
    if gate_up.packed is not None or down.packed is not None:
        routing = Routing.of(flat, count)
        products = _plus(gate_up.products(x, routing, per_token), experts.gate_up_bias, flat)
        y = _plus(down.products(experts.gated(products), routing, 1), experts.down_bias, flat)
        return _weighted(y.view(tokens, per_token, -1), weights[..., None], 1)
    if 3 * tokens * per_token <= count:
        rows = x.repeat_interleave(per_token, dim=0)[:, None]  # (T * per_token, 1, hidden)
        y = _expert_mlps(rows, experts, flat)
        return _weighted(y.view(tokens, per_token, -1), weights[..., None], 1)
    scales = weights.new_zeros(tokens, count).scatter(1, chosen, weights)
    repeated = x.expand(count, -1, -1)  # (E, T, hidden)
    return _weighted(_expert_mlps(repeated, experts, slice(None)), scales.t()[..., None], 0)


def _expert_mlps(x: Tensor, experts: Experts, chosen: Tensor | slice) -> Tensor:
    """Return the outputs (B, T, hidden) of B chosen experts, each with its own x (T, hidden)."""
    gate_up, down = experts.gate_up.whole()[chosen], experts.down.whole()[chosen]
    products = _plus(torch.bmm(x, gate_up.transpose(1, 2)), experts.gate_up_bias, chosen)
    outputs = torch.bmm(experts.gated(products), down.transpose(1, 2))
    return _plus(outputs, experts.down_bias, chosen)


def _plus(y: Tensor, bias: Tensor | None, chosen: Tensor | slice) -> Tensor:
    """Add the biases of B chosen experts to products y (B, rows) or (B, T, rows), in place."""
    if bias is None:
        return y
    return y.add_(bias[chosen] if y.dim() == 2 else bias[chosen][:, None])


def _weighted(y: Tensor, scales: Tensor, dim: int) -> Tensor:
    return (y * scales).sum(dim).to(y.dtype)
