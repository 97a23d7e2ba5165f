"""What recurrent layers have in place of attention, whichever their recurrence.

The recurrence is the cache's, as attention is: here are its inputs and what its outputs become.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from offload.recurrent.recurrence import RecurrentInputs
from parallel.batch_invariant import map_blocks
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import mixer_name
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import RowParallelLinear
from parallel.model.residual import Branch
from parallel.ranks.process_group import AsyncSum
from parallel.weights.matrix import empty_parameter


class Recurs(Protocol):
    """The interface that a recurrent layer needs of a cache, or of a prefill into one."""

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor: ...


class Decay(Module):
    """The decay of each value head's state: exp(rate softplus(a + bias)), in float32."""

    in_float32 = True

    def __init__(self, heads: int, has_skip: bool = False):
        """`has_skip`: whether heads also have the number by which values are added to outputs."""
        super().__init__()
        self.rate, self.bias = empty_parameter(heads), empty_parameter(heads)
        self.skip = empty_parameter(heads) if has_skip else None

    def load(self, checkpoint: Checkpoint, prefix: str, count: int, heads: list[slice]) -> None:
        """Read these of all heads from the tensors PREFIX.A_log, .dt_bias and .D, (count,) each."""
        for name, own in (("A_log", self.rate), ("dt_bias", self.bias), ("D", self.skip)):
            if own is not None:
                tensor = checkpoint.tensor(f"{prefix}.{name}", (count,))
                own.copy_(torch.cat([tensor[part] for part in heads]))
        if not checkpoint.is_converted:
            self.rate.copy_(-self.rate.exp())

    def steps(self, a: Tensor) -> Tensor:
        """Return the step sizes (T, Hv) float32: softplus(a + bias)."""
        return map_blocks(lambda rows: F.softplus(rows.float() + self.bias), a)

    def forward(self, a: Tensor) -> Tensor:
        """Return the logarithms (T, Hv) float32 of a's decays."""
        return self.rate * self.steps(a)


class RecurrentMixer(Branch):
    """A recurrent layer's branch, over this rank's heads."""

    out_proj: RowParallelLinear
    kernel: Parameter  # (C, K), the convolution's

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, config.norms.attention, mixer_name(config, layer))
        assert config.recurrent is not None
        self.layer, self.shape, self.eps = layer, config.recurrent, config.norm_eps

    @abstractmethod
    def project(self, x: Tensor) -> tuple[RecurrentInputs, Tensor]:
        """Return what the recurrence needs of x (T, hidden), and the gates (T, Hv * Dv)."""

    @abstractmethod
    def gated(self, outs: Tensor, z: Tensor) -> Tensor:
        """Return the outputs (T, Hv * Dv), normalised and gated by z."""

    def forward(self, x: Tensor, cache: Recurs, start: int) -> AsyncSum:
        """Transform x (T, hidden), the tokens from position `start` on.

        Returns a pending all-reduce (T, hidden), which alone holds memory until it is waited for.
        """
        inputs, z = self.project(self.pre(x))
        outs = cache.recur(self.layer, inputs, start)
        return self.post(self.out_proj(self.gated(outs.flatten(1), z)))

    def store_kv(self, x: Tensor, cache: Recurs, start: int) -> None:
        """Advance the state past x (T, hidden), if the output is not needed."""
        inputs, _ = self.project(self.pre(x))
        cache.recur(self.layer, inputs, start)

    def load_kernel(self, checkpoint: Checkpoint, prefix: str, channels: Sequence[slice]) -> None:
        """Read the rows of these channels from the tensor PREFIX.conv1d.weight (C, 1, K)."""
        inner = (1, self.shape.kernel_size)[int(checkpoint.is_converted) :]
        tensor = checkpoint.tensor(f"{prefix}.conv1d.weight", (self.shape.channels, *inner))
        rest = [slice(0, size) for size in inner]
        indices = [(own, *rest) for own in channels]
        self.kernel.copy_(torch.cat([tensor[index].flatten(1) for index in indices]))
