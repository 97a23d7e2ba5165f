"""Residual branches: the base class with its norm, and the dense MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from parallel.batch_invariant import map_blocks
from parallel.config.families import BranchNorms
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import XIELU_NUMBERS, mlp_inputs
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear, make_norm
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.matrix import empty_parameter


class Branch(Module):
    """A residual branch: x + multiplier * post_norm(f(pre_norm(x))), with one norm or both."""

    def __init__(self, config: ModelConfig, norm_names: BranchNorms, name: str = ""):
        """`name`: that of its tensors but norms in a layer of the checkpoint, if it varies."""
        super().__init__()
        self.name = name
        self.norm_names = norm_names
        self.pre_norm, self.post_norm = (
            None if name is None else make_norm(config) for name in norm_names
        )
        self.multiplier = config.residual_multiplier

    def pre(self, x: Tensor) -> Tensor:
        """Return the branch's input, from hidden states x (T, hidden)."""
        return x if self.pre_norm is None else self.pre_norm(x)

    def post(self, total: AsyncSum) -> AsyncSum:
        """Return the branch's pending output, from its pending all-reduce (T, hidden)."""
        if self.post_norm is None and self.multiplier == 1.0:
            return total

        def wait() -> Tensor:
            x = total() if self.post_norm is None else self.post_norm(total())
            return x if self.multiplier == 1.0 else x * self.multiplier

        return wait

    def load_norms(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the norms of layer PREFIX."""
        for name, norm in zip(self.norm_names, (self.pre_norm, self.post_norm), strict=True):
            if norm is not None:
                norm.load(checkpoint, f"{prefix}.{name}")


class Mlp(Branch):
    """A layer's gated MLP, over this rank's intermediate dimensions."""

    def __init__(
        self, config: ModelConfig, group: TensorParallelGroup, norms: BranchNorms | None = None
    ):
        """`norms`: names of its own, if they are not the model's."""
        super().__init__(config, norms or config.norms.mlp)
        outputs = [config.intermediate] * mlp_inputs(config)
        self.names = config.mlp_names
        self.activate = XIELU() if config.activation == "xielu" else ACTIVATIONS[config.activation]
        self.gate_up = ColumnParallelLinear(group, config.hidden, outputs, config.mlp_bias)
        self.down = RowParallelLinear(group, config.intermediate, config.hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> AsyncSum:
        """Transform x (T, hidden); return a pending all-reduce (T, hidden)."""
        parts = self.gate_up(self.pre(x))
        return self.post(self.down(map_blocks(self.activate, *parts)))

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        self.gate_up.load(checkpoint, self.names.inputs(prefix, checkpoint))
        prefix = f"{prefix}.{self.names.block}"
        self.down.load(checkpoint, f"{prefix}.{self.names.down}")
        if isinstance(self.activate, XIELU):
            self.activate.load(checkpoint, f"{prefix}.act_fn")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0) ** 2 (So et al. 2021, Primer, arXiv 2109.08668, section 3)."""
    return F.relu(x).square()


class XIELU(Module):
    """A parabola for positive x, and an exponential for others, with slopes that are learned.

    Source: Huang and Schlag 2024, Deriving activation functions via integration, arXiv 2411.13010;
    the parameters are as in transformers, activations.py.
    """

    in_float32 = True

    def __init__(self) -> None:
        super().__init__()
        # the curvatures of both sides, the slope at 0, and the largest x of the exponential
        self.numbers = empty_parameter(XIELU_NUMBERS)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the tensors PREFIX.{alpha_p, alpha_n} (1,), and .{beta, eps} of no dimension."""
        positive, negative = (
            F.softplus(checkpoint.tensor(f"{prefix}.alpha_{side}", (1,))[:].float())
            for side in "pn"
        )
        beta, eps = (checkpoint.tensor(f"{prefix}.{name}", ())[...] for name in ("beta", "eps"))
        self.numbers.copy_(torch.stack([positive[0], beta + negative[0], beta, eps]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of x (T, D), computed in float32."""
        positive, negative, beta, eps = self.numbers
        wide = x.float()
        below = (torch.expm1(wide.minimum(eps)) - wide) * negative
        return (torch.where(wide > 0, positive * wide.square(), below) + beta * wide).to(x.dtype)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": gated,
    "gelu_pytorch_tanh": gelu_gated,
    "relu2": squared_relu,
}


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x (T, D) times the sigmoid of gates (T, D), or of one (T, 1) for each token."""
    return x * gate.sigmoid()
