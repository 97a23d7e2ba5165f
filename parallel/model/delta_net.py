"""A layer's gated delta net, in place of attention (Yang et al. 2025, arXiv 2412.06464).

The recurrence is the cache's, as attention is: here are its inputs and what its outputs become.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from offload.recurrent.delta_rule import DeltaInputs
from parallel.batch_invariant import map_blocks
from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.formats.tensors import ColumnParts
from parallel.model.delta_heads import STACKS, HeadRows
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel.model.residual import Branch
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.matrix import empty_parameter
from parallel.weights.packed import Slice


class Recurs(Protocol):
    """The interface that a recurrent layer needs of a cache, or of a prefill into one."""

    def recur(self, layer: int, inputs: DeltaInputs, start: int) -> Tensor: ...


class Decay(Module):
    """The decay of each value head's state: exp(rate softplus(a + bias)), in float32."""

    in_float32 = True

    def __init__(self, heads: int):
        super().__init__()
        self.rate, self.bias = empty_parameter(heads), empty_parameter(heads)

    def load(self, checkpoint: Checkpoint, prefix: str, count: int, heads: list[slice]) -> None:
        """Read these of all heads from the tensors PREFIX.A_log and PREFIX.dt_bias (count,)."""
        for name, own in (("A_log", self.rate), ("dt_bias", self.bias)):
            tensor = checkpoint.tensor(f"{prefix}.{name}", (count,))
            own.copy_(torch.cat([tensor[part] for part in heads]))
        if not checkpoint.is_converted:
            self.rate.copy_(-self.rate.exp())

    def forward(self, a: Tensor) -> Tensor:
        """Return the logarithms (T, Hv) float32 of a's decays."""
        return map_blocks(self._logarithms, a)

    def _logarithms(self, a: Tensor) -> Tensor:
        return self.rate * F.softplus(a.float() + self.bias)


class DeltaNet(Branch):
    """A layer's gated delta net, over this rank's heads: value heads stay with their key head."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, layer: int):
        super().__init__(config, config.norms.attention)
        assert config.recurrent is not None
        self.layer, self.shape = layer, config.recurrent
        shape, shared = self.shape, self.shape.shared
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        outputs = [keys, keys, values, values, shape.value_heads, shape.value_heads]
        # rows of a key head, and of the value heads that share it
        own = shape.key_dim, shared * shape.value_dim
        units = [own[0], own[0], own[1], own[1], shared, shared]
        # queries, keys and values; gates of the outputs; betas and decays
        self.in_proj = ColumnParallelLinear(group, config.hidden, outputs, False, units)
        share = self.in_proj.shares[-1]
        self.heads = HeadRows(shape, share.start // shared, share.stop // shared)
        self.decay = Decay(self.in_proj.sizes[-1])
        self.kernel = empty_parameter(sum(self.in_proj.sizes[:3]), shape.kernel_size)
        self.norm_weight = empty_parameter(shape.value_dim)
        self.eps = config.norm_eps
        self.out_proj = RowParallelLinear(group, values, config.hidden, False, own[1])

    def forward(self, x: Tensor, cache: Recurs, start: int) -> AsyncSum:
        """Transform x (T, hidden), the tokens from position `start` on.

        Returns a pending all-reduce (T, hidden), which alone holds memory until it is waited for.
        """
        return self.post(self.out_proj(self._gated_outputs(x, cache, start)))

    def store_kv(self, x: Tensor, cache: Recurs, start: int) -> None:
        """Advance the state past x (T, hidden), if the output is not needed."""
        self._gated_outputs(x, cache, start)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        prefix, shape, heads = f"{prefix}.linear_attn", self.shape, self.heads
        self.in_proj.weight.load(list(self._input_slices(checkpoint, prefix)))
        self.decay.load(checkpoint, prefix, shape.value_heads, heads.values(1))
        inner = (shape.kernel_size,) if checkpoint.is_converted else (1, shape.kernel_size)
        tensor = checkpoint.tensor(f"{prefix}.conv1d.weight", (shape.channels, *inner))
        rest = [slice(0, size) for size in inner]
        parts = [(own, *rest) for own in heads.channels]
        self.kernel.copy_(torch.cat([tensor[part].flatten(1) for part in parts]))
        norm = checkpoint.tensor(f"{prefix}.norm.weight", tuple(self.norm_weight.shape))
        self.norm_weight.copy_(norm[:])
        width = shape.value_heads * shape.value_dim
        tensor = checkpoint.tensor(f"{prefix}.out_proj.weight", (self.out_proj.outputs, width))
        columns = heads.values(shape.value_dim)
        if len(columns) > 1:
            tensor, columns = ColumnParts(tensor, columns), [slice(0, self.out_proj.weight.columns)]
        self.out_proj.weight.load([Slice(tensor, slice(0, self.out_proj.outputs), columns[0])])

    def _gated_outputs(self, x: Tensor, cache: Recurs, start: int) -> Tensor:
        """Return the normalised and gated outputs (T, Hv * Dv) of this rank's heads."""
        q, k, v, z, b, a = self.in_proj(self.pre(x))
        betas = map_blocks(lambda rows: rows.float().sigmoid(), b)
        inputs = DeltaInputs(torch.cat((q, k, v), dim=-1), self.decay(a), betas, self.kernel)
        del q, k, v  # frees a chunk's
        outs = cache.recur(self.layer, inputs, start)
        return map_blocks(self._gated, outs.flatten(1), z)

    def _gated(self, outs: Tensor, z: Tensor) -> Tensor:
        """Return the RMSNorm of each head's outputs, times silu(z)."""
        heads = outs.unflatten(-1, (-1, len(self.norm_weight)))
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps).to(outs.dtype)
        gates = F.silu(z.float()).view_as(heads)
        return (self.norm_weight * normed * gates).to(outs.dtype).flatten(1)

    def _input_slices(self, checkpoint: Checkpoint, prefix: str) -> Iterator[Slice]:
        """Yield this rank's rows of queries, keys, values, gates, betas and decays."""
        hidden = self.in_proj.inputs
        for stack, separate in STACKS.items():
            is_stacked = f"{prefix}.in_proj_{stack}.weight" in checkpoint
            for name in (stack,) if is_stacked else separate:
                height, rows = self.heads.inputs(name)
                tensor = checkpoint.tensor(f"{prefix}.in_proj_{name}.weight", (height, hidden))
                yield from (Slice(tensor, own, slice(0, hidden)) for own in rows)
