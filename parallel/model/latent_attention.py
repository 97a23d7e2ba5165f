"""A layer's multi-head latent attention, which keeps a token's latent alone.

A head's keys and values are projections of one latent of each token. Here the projection of keys is
applied to queries instead, and that of values to what attention returns: the latent, and a rotated
key of all heads before it, are then keys and values of one KV head, which all ranks have. In large
chunks of a prompt, heads have their own keys and values, for as long as they are attended to.

Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from math import sqrt
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from offload.attention.expanded_latents import LatentHeads
from offload.attention.folding import Partial
from parallel.batch_invariant import map_blocks
from parallel.config.layer_heads import LatentShape
from parallel.config.model_config import ModelConfig
from parallel.formats.checkpoint import Checkpoint
from parallel.model.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from parallel.model.residual import Branch
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.matrix import empty_parameter

_NORM_EPS = 1e-6  # whatever the config says (transformers, modeling_deepseek_v3.py)


class Attends(Protocol):
    """The interface that latent attention needs of a cache, or of a prefill into one."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial: ...


class PrefillsLatents(Attends, Protocol):
    """The interface that it needs of a prefill."""

    def store(self, layer: int, k: Tensor, v: Tensor, start: int) -> None: ...

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads, start: int
    ) -> Partial: ...


class HeadWeights(Module):
    """The projections of latents to keys and values of this rank's heads."""

    def __init__(self, shape: LatentShape, share: slice):
        """`share`: the rank's rows of the projection of queries."""
        super().__init__()
        self.shape, self.share = shape, share
        heads = (share.stop - share.start) // shape.query_dim
        self.keys = empty_parameter(heads, shape.plain_dim, shape.rank)
        self.values = empty_parameter(heads, shape.value_dim, shape.rank)

    def load(self, checkpoint: Checkpoint, prefix: str, heads: int) -> None:
        """Read this rank's rows of the tensor PREFIX.kv_b_proj.weight, of so many heads.

        Files may have PREFIX.k_b_proj.weight, transposed, and PREFIX.v_b_proj.weight instead.
        """
        shape = self.shape
        if f"{prefix}.k_b_proj.weight" in checkpoint:
            keys = self._rows(checkpoint, f"{prefix}.k_b_proj", heads, shape.rank, shape.plain_dim)
            values = self._rows(checkpoint, f"{prefix}.v_b_proj", heads, shape.value_dim)
            self.keys.copy_(keys.transpose(1, 2))
            self.values.copy_(values)
            return
        per_head = shape.plain_dim + shape.value_dim
        weights = self._rows(checkpoint, f"{prefix}.kv_b_proj", heads, per_head)
        self.keys.copy_(weights[:, : shape.plain_dim])
        self.values.copy_(weights[:, shape.plain_dim :])

    def _rows(
        self, checkpoint: Checkpoint, name: str, heads: int, rows: int, columns: int | None = None
    ) -> Tensor:
        """Return the rows (H, rows, columns) of this rank's heads, of the tensor NAME.weight."""
        shape = heads * rows, columns or self.shape.rank
        tensor = checkpoint.tensor(f"{name}.weight", shape)
        own = (each // self.shape.query_dim * rows for each in (self.share.start, self.share.stop))
        return tensor[slice(*own)].unflatten(0, (-1, rows))

    def keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (N, H, own_dim) of rotated latents (N, head_dim)."""
        shape, heads = self.shape, len(self.keys)
        rotated, latent = latents.split([shape.rope_dim, shape.rank], dim=-1)
        keys = F.linear(latent, self.keys.flatten(0, 1)).unflatten(-1, (heads, -1))
        keys = torch.cat((rotated[:, None].expand(-1, heads, -1), keys), dim=-1)
        values = F.linear(latent, self.values.flatten(0, 1)).unflatten(-1, (heads, -1))
        return self._padded(keys), self._padded(values)

    def own_queries(self, q: Tensor) -> Tensor:
        """Return queries (T, H, own_dim) of `keys_and_values`, given a layer's (T, H, query_dim).

        Attention divides scores by the square root of their dimensions, which are others than those
        of latents, for which the layer scales queries.
        """
        return self._padded(q) * sqrt(self.shape.own_dim / self.shape.head_dim)

    def latent_queries(self, q: Tensor) -> Tensor:
        """Return `own_queries`, rotated, as queries (T, H, head_dim) of latents."""
        shape = self.shape
        plain = q[..., shape.rope_dim : shape.query_dim]
        parts = q[..., : shape.rope_dim], self.queries(plain)
        return torch.cat(parts, dim=-1) * sqrt(shape.head_dim / shape.own_dim)

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.shape.own_dim - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def queries(self, plain: Tensor) -> Tensor:
        """Return what queries (T, H, plain_dim) of keys are as queries (T, H, rank) of latents."""
        return torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1)

    def outputs(self, out: Tensor) -> Tensor:
        """Return the heads' outputs (T, H * value_dim), given attention's (T, H, head_dim)."""
        latent = out[..., self.shape.rope_dim :].transpose(0, 1)
        return torch.bmm(latent, self.values.transpose(1, 2)).transpose(0, 1).flatten(1)


class LatentAttention(Branch):
    """A layer's attention to latents, over this rank's query heads."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, layer: int):
        super().__init__(config, config.norms.attention)
        assert config.latent is not None
        shape = self.shape = config.latent
        self.layer, self.query_multiplier = layer, config.query_multiplier
        self.is_interleaved = config.interleaved_rope
        outputs = [shape.rank + shape.rope_dim]
        if shape.query_rank is not None:
            outputs = [shape.query_rank, *outputs]
        # every rank needs all of its results
        whole = TensorParallelGroup()
        self.inputs = ColumnParallelLinear(whole, config.hidden, outputs, config.qkv_bias)
        self.query_norm: RMSNorm | None = None
        if shape.query_rank is not None:
            self.query_norm = RMSNorm(shape.query_rank, _NORM_EPS)
        self.latent_norm = RMSNorm(shape.rank, _NORM_EPS)
        rows, width = [config.heads * shape.query_dim], shape.query_rank or config.hidden
        self.q = ColumnParallelLinear(group, width, rows, False, [shape.query_dim])
        self.heads = HeadWeights(shape, self.q.shares[0])
        values = config.heads * shape.value_dim
        self.o = RowParallelLinear(group, values, config.hidden, config.o_bias, shape.value_dim)

    def forward(self, x: Tensor, cache: Attends, start: int) -> AsyncSum:
        """Attend with x (T, hidden), the tokens from position `start` on.

        Returns a pending all-reduce (T, hidden), which alone holds memory until it is waited for.
        """
        q, keys = self._projections(self.pre(x))
        out, _ = cache.attend(self.layer, map_blocks(self._queries, q), keys, keys, start)
        return self.post(self.o(map_blocks(self.heads.outputs, out)))

    def prefill(self, x: Tensor, cache: PrefillsLatents, start: int) -> AsyncSum:
        """Attend as `forward` with a chunk of a prompt, through heads' own KV if that is less."""
        if not self.shape.has_own_kv(len(x)):
            return cast(AsyncSum, self(x, cache, start))
        q, keys = self._projections(self.pre(x))
        parts = self._query_parts(q)
        own = self.heads.own_queries(torch.cat(parts, dim=-1) * self.query_multiplier)
        out, _ = cache.attend_latents(self.layer, own, keys, self.heads, start)
        return self.post(self.o(out[..., : self.shape.value_dim].flatten(1)))

    def store_kv(self, x: Tensor, cache: PrefillsLatents, start: int) -> None:
        """Store the latents of x (T, hidden), if its attention output is not needed."""
        keys = self._keys(self.inputs(self.pre(x), first=len(self.inputs.sizes) - 1)[0])
        cache.store(self.layer, keys, keys, start)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        prefix = f"{prefix}.self_attn"
        names = ["kv_a_proj_with_mqa"]
        if self.query_norm is not None:
            names = ["q_a_proj", *names]
            self.query_norm.load(checkpoint, f"{prefix}.q_a_layernorm")
        self.inputs.load(checkpoint, [f"{prefix}.{name}" for name in names])
        self.latent_norm.load(checkpoint, f"{prefix}.kv_a_layernorm")
        name = "q_proj" if self.query_norm is None else "q_b_proj"
        self.q.load(checkpoint, [f"{prefix}.{name}"])
        heads = self.q.outputs[0] // self.shape.query_dim
        self.heads.load(checkpoint, prefix, heads)
        self.o.load(checkpoint, f"{prefix}.o_proj")

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries (T, H * query_dim) of keys, and the keys (T, 1, D)."""
        parts = self.inputs(x)
        (q,) = self.q(x if self.query_norm is None else self.query_norm(parts[0]))
        return q, self._keys(parts[-1])

    def _keys(self, compressed: Tensor) -> Tensor:
        """Return the keys (T, 1, D), from latents and then rotated dimensions (T, D)."""
        latent, rotated = compressed.split([self.shape.rank, self.shape.rope_dim], dim=-1)
        return torch.cat((*self._halves(rotated), self.latent_norm(latent)), dim=-1)[:, None]

    def _queries(self, q: Tensor) -> Tensor:
        """Return the queries (T, H, D) of latents, from those of keys (T, H * query_dim)."""
        *rotated, plain = self._query_parts(q)
        return torch.cat((*rotated, self.heads.queries(plain)), dim=-1) * self.query_multiplier

    def _query_parts(self, q: Tensor) -> list[Tensor]:
        """Return the dimensions (T, H, ...) of queries (T, H * query_dim), the rotated first."""
        heads = q.unflatten(-1, (-1, self.shape.query_dim))
        plain, rotated = heads.split([self.shape.plain_dim, self.shape.rope_dim], dim=-1)
        return [*self._halves(rotated), plain]

    def _halves(self, rotated: Tensor) -> list[Tensor]:
        """Return dimensions (..., D) in parts, in the order in which caches rotate them."""
        if self.is_interleaved:
            return [rotated[..., ::2], rotated[..., 1::2]]
        return [rotated]
