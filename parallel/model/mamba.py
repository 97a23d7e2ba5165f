"""A layer's Mamba-2, in place of attention (Dao and Gu 2024, arXiv 2405.21060, section 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from offload.recurrent.recurrence import RecurrentInputs
from parallel.batch_invariant import map_blocks
from parallel.config.model_config import ModelConfig
from parallel.config.recurrent import head_shares
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel.model.recurrent_mixer import Decay, RecurrentMixer
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import empty_parameter
from parallel.weights.packed import Slice


class GatedNorm(Module):
    """The RMSNorm of x silu(z) in groups of equal size, of which each rank has whole ones.

    A single group is spread over all ranks, whose sums of squares meet in one all-reduce.
    """

    def __init__(
        self, group: TensorParallelGroup, groups: int, size: int, share: slice, eps: float
    ):
        """`share`: this rank's part of the width, which is `groups` times `size`."""
        super().__init__()
        self.group, self.size, self.share, self.eps = group, size, share, eps
        self.width, self.is_spread = groups * size, groups == 1
        self.weight = empty_parameter(share.stop - share.start)

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Read this rank's part of the tensor NAME.weight (width,)."""
        self.weight.copy_(checkpoint.tensor(f"{name}.weight", (self.width,))[self.share])

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalize x (T, width / ranks) times silu(z)."""
        gated = map_blocks(_gated, x, z)
        squares = map_blocks(self._square_sums, gated)  # (T, groups)
        if self.is_spread:
            squares = self.group.all_reduce(squares)
        return map_blocks(self._norm, gated, squares).to(x.dtype)

    def _square_sums(self, x: Tensor) -> Tensor:
        return self._in_groups(x).square().sum(-1)

    def _norm(self, x: Tensor, squares: Tensor) -> Tensor:
        """Normalize x (T, width / ranks) float32 in place."""
        scale = torch.rsqrt(squares / self.size + self.eps)
        self._in_groups(x).mul_(scale[..., None])
        return x.mul_(self.weight)

    def _in_groups(self, x: Tensor) -> Tensor:
        """Return x (T, width / ranks) as (T, groups, size), or this rank's part of a single one."""
        return x[:, None] if self.is_spread else x.unflatten(-1, (-1, self.size))


class Mamba2(RecurrentMixer):
    """A layer's Mamba-2, over this rank's heads: they stay with their group.

    A single group's B and C are on all ranks.
    """

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, layer: int):
        super().__init__(config, layer)
        shape = self.shape
        self.keys, self.values = head_shares(shape, group.rank, group.size)
        # a single group is as many as there are ranks, one of each
        groups, unit = shape.key_heads, shape.shared
        if groups == 1:
            groups, unit = group.size, 1
        keys = groups * shape.key_dim
        width, own = shape.value_heads * shape.value_dim, unit * shape.value_dim
        # C, B and x, the gates of the outputs, and the steps
        outputs = [keys, keys, width, width, shape.value_heads]
        units = [shape.key_dim, shape.key_dim, own, own, unit]
        self.in_proj = ColumnParallelLinear(group, config.hidden, outputs, False, units)
        channels = sum(self.in_proj.sizes[:3])
        self.decay = Decay(self.in_proj.sizes[-1], has_skip=True)
        self.kernel = empty_parameter(channels, shape.kernel_size)
        self.kernel_bias = empty_parameter(channels)
        share = self.in_proj.shares[2]
        self.norm = GatedNorm(group, shape.key_heads, width // shape.key_heads, share, self.eps)
        self.out_proj = RowParallelLinear(group, width, config.hidden, False, own)

    def project(self, x: Tensor) -> tuple[RecurrentInputs, Tensor]:
        *channels, z, a = self.in_proj(x)
        steps = self.decay.steps(a)
        return RecurrentInputs(
            torch.cat(channels, dim=-1),
            self.decay.rate * steps,
            steps,
            self.kernel,
            self.kernel_bias,
            self.decay.skip,
        ), z

    def gated(self, outs: Tensor, z: Tensor) -> Tensor:
        normed: Tensor = self.norm(outs, z)
        return normed

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        prefix, shape = f"{prefix}.{self.name}", self.shape
        width, height = shape.value_heads * shape.value_dim, shape.key_heads * shape.key_dim
        keys, values = _times(self.keys, shape.key_dim), _times(self.values, shape.value_dim)
        # the tensors' order is z, x, B, C and the steps
        channels = [_after(width + height, keys), _after(width, keys), values]
        steps = _after(width + shape.channels, self.values)
        rows = [*(_after(width, own) for own in channels), values, steps]
        total = width + shape.channels + shape.value_heads
        tensor = checkpoint.tensor(f"{prefix}.in_proj.weight", (total, self.in_proj.inputs))
        self.in_proj.weight.load(
            [Slice(tensor, own, slice(0, self.in_proj.inputs)) for own in rows]
        )
        self.decay.load(checkpoint, prefix, shape.value_heads, [self.values])
        self.load_kernel(checkpoint, prefix, channels)
        bias = checkpoint.tensor(f"{prefix}.conv1d.bias", (shape.channels,))
        self.kernel_bias.copy_(torch.cat([bias[own] for own in channels]))
        self.norm.load(checkpoint, f"{prefix}.norm")
        self.out_proj.load(checkpoint, f"{prefix}.out_proj")


def _gated(x: Tensor, z: Tensor) -> Tensor:
    return F.silu(z.float()).mul_(x)


def _times(heads: slice, size: int) -> slice:
    """Return the rows of heads, which have `size` rows each."""
    return slice(heads.start * size, heads.stop * size)


def _after(offset: int, rows: slice) -> slice:
    """Return rows that follow `offset` others."""
    return slice(offset + rows.start, offset + rows.stop)
