"""Residual branches: the base class with its norm, and the dense MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from parallel.batch_invariant import map_blocks
from parallel.config.families import BranchNorms
from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear, make_norm
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup


class Branch(Module):
    """A residual branch: x + multiplier * post_norm(f(pre_norm(x))), with one norm or both."""

    def __init__(self, config: ModelConfig, norm_names: BranchNorms):
        super().__init__()
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
        outputs = [config.intermediate] * 2
        self.names = config.mlp_names
        self.gated = gelu_gated if config.is_gemma else gated
        self.gate_up = ColumnParallelLinear(group, config.hidden, outputs, config.mlp_bias)
        self.down = RowParallelLinear(group, config.intermediate, config.hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> AsyncSum:
        """Transform x (T, hidden); return a pending all-reduce (T, hidden)."""
        gate, up = self.gate_up(self.pre(x))
        return self.post(self.down(map_blocks(self.gated, gate, up)))

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        block, gate_up, down = self.names
        self.gate_up.load(checkpoint, [f"{prefix}.{block}.{name}" for name in gate_up])
        self.down.load(checkpoint, f"{prefix}.{block}.{down}")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x (T, D) times the sigmoid of gates (T, D), or of one (T, 1) for each token."""
    return x * gate.sigmoid()
