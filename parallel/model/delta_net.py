"""A layer's gated delta net, in place of attention (Yang et al. 2025, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.layout import RecurrentShape
from offload.recurrent.recurrence import RecurrentInputs
from parallel.batch_invariant import map_blocks
from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.formats.tensors import ColumnParts
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel.model.recurrent_mixer import Decay, RecurrentMixer
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import empty_parameter
from parallel.weights.packed import Slice

# Qwen3-Next stacks these projections by key head, others have each by itself
_STACKS = {"qkvz": ("qkv", "z"), "ba": ("b", "a")}


class DeltaNet(RecurrentMixer):
    """A layer's gated delta net, over this rank's heads: value heads stay with their key head."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, layer: int):
        super().__init__(config, layer)
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
        self.out_proj = RowParallelLinear(group, values, config.hidden, False, own[1])

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        prefix, shape, heads = f"{prefix}.{self.name}", self.shape, self.heads
        self.in_proj.weight.load(list(self._input_slices(checkpoint, prefix)))
        self.decay.load(checkpoint, prefix, shape.value_heads, heads.values(1))
        self.load_kernel(checkpoint, prefix, heads.channels)
        norm = checkpoint.tensor(f"{prefix}.norm.weight", tuple(self.norm_weight.shape))
        self.norm_weight.copy_(norm[:])
        width = shape.value_heads * shape.value_dim
        tensor = checkpoint.tensor(f"{prefix}.out_proj.weight", (self.out_proj.outputs, width))
        columns = heads.values(shape.value_dim)
        if len(columns) > 1:
            tensor, columns = ColumnParts(tensor, columns), [slice(0, self.out_proj.weight.columns)]
        self.out_proj.weight.load([Slice(tensor, slice(0, self.out_proj.outputs), columns[0])])

    def project(self, x: Tensor) -> tuple[RecurrentInputs, Tensor]:
        q, k, v, z, b, a = self.in_proj(x)
        betas = map_blocks(lambda rows: rows.float().sigmoid(), b)
        channels = torch.cat((q, k, v), dim=-1)
        return RecurrentInputs(channels, self.decay(a), betas, self.kernel), z

    def gated(self, outs: Tensor, z: Tensor) -> Tensor:
        return map_blocks(self._gated, outs, z)

    def _gated(self, outs: Tensor, z: Tensor) -> Tensor:
        """Return the RMSNorm of each head's outputs, times silu(z)."""
        heads = outs.unflatten(-1, (-1, len(self.norm_weight)))
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps).to(outs.dtype)
        gates = F.silu(z.float()).view_as(heads)
        return (self.norm_weight * normed * gates).to(outs.dtype).flatten(1)

    def _input_slices(self, checkpoint: Checkpoint, prefix: str) -> Iterator[Slice]:
        """Yield this rank's rows of queries, keys, values, gates, betas and decays."""
        hidden = self.in_proj.inputs
        for stack, separate in _STACKS.items():
            is_stacked = f"{prefix}.in_proj_{stack}.weight" in checkpoint
            for name in (stack,) if is_stacked else separate:
                height, rows = self.heads.inputs(name)
                tensor = checkpoint.tensor(f"{prefix}.in_proj_{name}.weight", (height, hidden))
                yield from (Slice(tensor, own, slice(0, hidden)) for own in rows)


@dataclass(frozen=True)
class HeadRows:
    """The rows of some consecutive key heads, and of the value heads that share them."""

    shape: RecurrentShape  # with the heads of the whole model
    first: int  # key head
    last: int

    @property
    def channels(self) -> list[slice]:
        """The rows of queries, keys and values, stacked in this order."""
        shape, keys = self.shape, self.shape.key_heads * self.shape.key_dim
        own = slice(self.first * shape.key_dim, self.last * shape.key_dim)
        of_keys = slice(keys + own.start, keys + own.stop)
        return [own, of_keys, *self.values(shape.value_dim, 2 * keys)]

    def values(self, size: int, start: int = 0) -> list[slice]:
        """Return the rows of value heads, which have `size` rows each, from row `start` on."""
        shape = self.shape
        if not shape.is_tiled or self.last - self.first == shape.key_heads:
            return [_slice(start, size, self.first * shape.shared, self.last * shape.shared)]
        tiles = range(0, shape.value_heads, shape.key_heads)
        return [_slice(start, size, tile + self.first, tile + self.last) for tile in tiles]

    def inputs(self, name: str) -> tuple[int, list[slice]]:
        """Return the height of a projection's tensor in_proj_NAME, and the rows in it."""
        shape, own = self.shape, self.shape.shared * self.shape.value_dim
        if name == "qkv":
            return shape.channels, self.channels
        if name == "z":
            return shape.value_heads * shape.value_dim, self.values(shape.value_dim)
        if name == "qkvz":
            return self._by_head([shape.key_dim, shape.key_dim, own, own])
        if name == "ba":
            return self._by_head([shape.shared, shape.shared])
        return shape.value_heads, self.values(1)

    def _by_head(self, sizes: Sequence[int]) -> tuple[int, list[slice]]:
        """Return height and rows of a tensor that stacks parts of these sizes of each key head."""
        height, rows, before = sum(sizes), list[slice](), 0
        for size in sizes:
            starts = (head * height + before for head in range(self.first, self.last))
            rows += [slice(start, start + size) for start in starts]
            before += size
        return self.shape.key_heads * height, rows


def _slice(start: int, size: int, first: int, last: int) -> slice:
    """Return the rows of heads, which have `size` rows each, from row `start` on."""
    return slice(start + first * size, start + last * size)
