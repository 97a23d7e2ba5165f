"""One Llama for target, middle and draft. They differ in the cache that `attend` goes to, and
nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList

from offload.layout import ceil_div
from offload.prefill import LAST_ROWS
from parallel.checkpoint import Checkpoint
from parallel.config import ModelConfig
from parallel.group import Group
from parallel.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, VocabParallelEmbedding

Progress = Callable[[int, int], None]  # units done, units in all


class Attending(Protocol):
    """What a layer asks of a cache, or of a prompt's way into it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor: ...


class AttendingCache(Attending, Protocol):
    """What a model asks of a cache."""

    length: int

    def begin(self, rows: int) -> None: ...


class PrefillingCache(Attending, Protocol):
    """What a layer-major prefill asks."""

    def keep(self, layer: int, k: Tensor, v: Tensor, start: int) -> None: ...


class Layer(Module):
    """Attention and MLP, each column-parallel in and row-parallel out: two all-reduces a layer."""

    def __init__(self, config: ModelConfig, group: Group, index: int):
        super().__init__()
        self.config, self.index = config, index
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.input_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = ColumnParallelLinear(
            group, config.hidden, [queries, keys, keys], config.qkv_bias
        )
        self.o = RowParallelLinear(group, queries, config.hidden, config.o_bias)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = ColumnParallelLinear(
            group, config.hidden, [config.intermediate] * 2, config.mlp_bias
        )
        self.down = RowParallelLinear(group, config.intermediate, config.hidden, config.mlp_bias)

    # (T, hidden) -> (T, hidden)
    def forward(self, x: Tensor, cache: Attending, start: int) -> Tensor:
        *_, (out,) = self.steps(x, cache, start)
        return out

    def steps(self, x: Tensor, cache: Attending, start: int) -> Iterator[tuple[Tensor, ...]]:
        """`forward` in three steps, of which the last yields the output; at each of the others a
        sum over ranks is under way.
        """
        # (T, H, D)
        q, k, v = (
            part.unflatten(-1, (-1, self.config.head_dim)) for part in self.qkv(self.input_norm(x))
        )
        attended = self.o(cache.attend(self.index, q, k, v, start).flatten(1))
        del q, k, v  # what waits here holds memory
        yield ()
        x = x + attended()
        del attended
        gate, up = self.gate_up(self.mlp_norm(x))
        grown = self.down(F.silu(gate) * up)
        del gate, up
        yield ()
        yield (x + grown(),)

    def keep(self, x: Tensor, cache: PrefillingCache, start: int) -> None:
        """What later tokens attend to, and no output; rows (T, hidden) of a prompt of which nobody
        asks more.
        """
        k, v = (
            part.unflatten(-1, (-1, self.config.head_dim))
            for part in self.qkv(self.input_norm(x), first=1)
        )
        cache.keep(self.index, k, v, start)

    def load(self, checkpoint: Checkpoint) -> None:
        config, prefix = self.config, f"model.layers.{self.index}."
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def weight(name: str, *shape: int):
            return checkpoint.tensor(prefix + name, shape)

        def stacked(module: str, names: list[str], sizes: list[int], bias: bool):
            weights = [
                weight(f"{module}.{name}.weight", size, config.hidden)
                for name, size in zip(names, sizes, strict=True)
            ]
            return weights, [
                weight(f"{module}.{name}.bias", size)
                for name, size in zip(names, sizes, strict=True)
                if bias
            ]

        self.input_norm.load(weight("input_layernorm.weight", config.hidden))
        self.qkv.load(
            *stacked(
                "self_attn", ["q_proj", "k_proj", "v_proj"], [queries, keys, keys], config.qkv_bias
            )
        )
        o_bias = weight("self_attn.o_proj.bias", config.hidden) if config.o_bias else None
        self.o.load(weight("self_attn.o_proj.weight", config.hidden, queries), o_bias)
        self.mlp_norm.load(weight("post_attention_layernorm.weight", config.hidden))
        self.gate_up.load(
            *stacked("mlp", ["gate_proj", "up_proj"], [config.intermediate] * 2, config.mlp_bias)
        )
        down_bias = weight("mlp.down_proj.bias", config.hidden) if config.mlp_bias else None
        self.down.load(
            weight("mlp.down_proj.weight", config.hidden, config.intermediate), down_bias
        )


class Llama(Module):
    """A decoder of the Llama family, sharded over `group`. Stateless: the sequence lives in the
    cache.
    """

    def __init__(self, config: ModelConfig, group: Group):
        super().__init__()
        self.config, self.group = config, group
        self.embed = VocabParallelEmbedding(group, config.vocab, config.hidden)
        self.layers = ModuleList(Layer(config, group, index) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = (
            self.embed
            if config.tied
            else VocabParallelEmbedding(group, config.vocab, config.hidden)
        )

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: AttendingCache, rows: int) -> Tensor:
        """Logits (rows, V) float32 that follow each of the last `rows` of tokens (T,), which stand
        behind the cache's content.

        The tokens' KV is written, but they count only once the caller advances the cache.
        """
        cache.begin(len(tokens))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cache, cache.length)
        return self.head.logits(self.norm(x[-rows:]))

    @torch.inference_mode()
    def prefill(
        self, tokens: Tensor, cache: PrefillingCache, chunk: int, progress: Progress | None = None
    ) -> Tensor:
        """Layer-major: all chunks of one layer before the next layer. tokens (T,); logits (1, V)
        that follow the last one.

        Holds the hidden states of the whole prompt; the cache holds one layer's KV at a time. To be
        called inside the cache's own `prefill` context, with what that yields. While the sums of
        one chunk are under way between the ranks, the next chunks compute. Of the last layer only
        the KV is made, and the output of the last few rows.
        """
        # even chunks: the last rows are what followers of the cache see
        chunk = ceil_div(len(tokens), ceil_div(len(tokens), chunk))
        x = self.norm.weight.new_empty(len(tokens), self.config.hidden)  # (T, hidden)
        for start in range(0, len(x), chunk):
            x[start : start + chunk] = self.embed(tokens[start : start + chunk])
        *others, last = (cast(Layer, layer) for layer in self.layers)
        for index, layer in enumerate(others):
            begun: deque[tuple[int, Iterator[tuple[Tensor, ...]]]] = deque()
            # two rounds more, for the last chunks' sums
            for start in range(0, len(x) + 2 * chunk, chunk):
                if start < len(x):
                    begun.append((start, layer.steps(x[start : start + chunk], cache, start)))
                # the newest first: what the others wait for is under way
                for at, steps in reversed(list(begun)):
                    for out in next(steps):
                        x[at : at + chunk] = out
                        begun.popleft()
                        if progress:
                            progress(
                                index * len(x) + min(at + chunk, len(x)), len(x) * len(self.layers)
                            )
        # behind the last chunk's start, which copies go by
        rest = max((len(x) - 1) // chunk * chunk, len(x) - LAST_ROWS)
        for start in range(0, rest, chunk):
            last.keep(x[start : min(start + chunk, rest)], cache, start)
        x = last(x[rest:], cache, rest)
        if progress:
            progress(len(tokens) * len(self.layers), len(tokens) * len(self.layers))
        return self.head.logits(self.norm(x[-1:]))

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill every parameter from the checkpoint, reading this rank's slices only. Raises
        CheckpointError.
        """
        config = self.config
        self.embed.load(
            checkpoint.tensor("model.embed_tokens.weight", (config.vocab, config.hidden))
        )
        for layer in self.layers:
            cast(Layer, layer).load(checkpoint)
        self.norm.load(checkpoint.tensor("model.norm.weight", (config.hidden,)))
        if not config.tied:
            self.head.load(checkpoint.tensor("lm_head.weight", (config.vocab, config.hidden)))
        checkpoint.refuse_leftovers()
