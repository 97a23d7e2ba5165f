"""Residual branches: the base class with its norm, and the dense MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from parallel.batch_invariant import map_blocks
from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup


class Branch(Module):
    """A residual branch: x + multiplier * f(norm(x)), or with a post-norm * norm(f(x))."""

    norm_names: tuple[str, str]  # in the checkpoint: the norm before the branch, and after it

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.post_norm = config.post_norm
        self.multiplier = config.residual_multiplier

    def pre(self, x: Tensor) -> Tensor:
        """Return the branch's input, from hidden states x (T, hidden)."""
        return x if self.post_norm else self.norm(x)

    def post(self, total: AsyncSum) -> AsyncSum:
        """Return the branch's pending output, from its pending all-reduce (T, hidden)."""
        if not self.post_norm and self.multiplier == 1.0:
            return total

        def wait() -> Tensor:
            x = self.norm(total()) if self.post_norm else total()
            return x if self.multiplier == 1.0 else x * self.multiplier

        return wait

    def load_norm(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the norm of layer PREFIX."""
        self.norm.load(checkpoint, f"{prefix}.{self.norm_names[self.post_norm]}")


class Mlp(Branch):
    """A layer's gated MLP, over this rank's intermediate dimensions."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __init__(self, config: ModelConfig, group: TensorParallelGroup):
        super().__init__(config)
        outputs = [config.intermediate] * 2
        self.names = ["gate_up_proj"] if config.fused_projections else ["gate_proj", "up_proj"]
        self.gate_up = ColumnParallelLinear(group, config.hidden, outputs, config.mlp_bias)
        self.down = RowParallelLinear(group, config.intermediate, config.hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> AsyncSum:
        """Transform x (T, hidden); return a pending all-reduce (T, hidden)."""
        gate, up = self.gate_up(self.pre(x))
        return self.post(self.down(map_blocks(_gated, gate, up)))

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norm(checkpoint, prefix)
        self.gate_up.load(checkpoint, [f"{prefix}.mlp.{name}" for name in self.names])
        self.down.load(checkpoint, f"{prefix}.mlp.down_proj")


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
