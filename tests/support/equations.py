"""Llama's equations at single positions of a long sequence, in float64, from the weights.

The reference for the engine, with which it shares no code. One key/value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

_KEY_BLOCK = 16_384  # keys per step of the running softmax

# (start, end) -> a layer's keys and values (N, D) at these positions
KeysAndValues = Callable[[int, int], tuple[Tensor, Tensor]]


class Equations:
    """A Llama with one key/value head and a checkpoint's weights in float64."""

    def __init__(self, folder: Path):
        config: Any = LlamaConfig.from_pretrained(folder)
        assert config.num_key_value_heads == 1
        weights = load_file(folder / "model.safetensors")
        self._weights = {
            name.removeprefix("model."): each.double() for name, each in weights.items()
        }
        self._heads, self._width = config.num_attention_heads, config.head_dim
        self._epsilon = config.rms_norm_eps
        # float32 angles, as in every implementation: at position 1,000,000 they are rounded to
        # 0.03, which is part of the model
        halves = torch.arange(0, self._width, 2).float() / self._width
        self._frequencies = 1 / config.rope_parameters["rope_theta"] ** halves

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input, (N, hidden)."""
        return self._weights["embed_tokens.weight"][tokens]

    def kv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values (N, D), of a layer's input."""
        normed = self._norm(f"layers.{layer}.input_layernorm", hidden)
        keys = self._linear(f"layers.{layer}.self_attn.k_proj", normed)
        values = self._linear(f"layers.{layer}.self_attn.v_proj", normed)
        return self._rotate(keys[:, None], positions)[:, 0], values

    def layer(self, layer: int, hidden: Tensor, positions: Tensor, keys: KeysAndValues) -> Tensor:
        """Return a layer's output (P, hidden) for its input at `positions` (P,)."""
        name = f"layers.{layer}"
        normed = self._norm(f"{name}.input_layernorm", hidden)
        queries = self._linear(f"{name}.self_attn.q_proj", normed)
        queries = queries.unflatten(1, (self._heads, self._width))
        heads = self._attend(self._rotate(queries, positions), positions, keys)
        hidden = hidden + self._linear(f"{name}.self_attn.o_proj", heads)
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
        up = self._linear(f"{name}.mlp.up_proj", normed)
        return hidden + self._linear(f"{name}.mlp.down_proj", gate * up)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (P, V) of the last layer's output."""
        return self._norm("norm", hidden) @ self._weights["lm_head.weight"].T

    def _attend(self, queries: Tensor, positions: Tensor, keys: KeysAndValues) -> Tensor:
        """Attend with (P, H, D) to all keys up to each position; return (P, H * D).

        Blockwise with a running maximum (Milakov and Gimelshein, arXiv 1805.02867).
        """
        maximum = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float64)
        total = torch.zeros_like(maximum)
        out = torch.zeros_like(queries)
        for start, end in _key_blocks(int(positions.max()) + 1):
            k, v = keys(start, end)
            scores = queries @ k.double().T / self._width**0.5
            mask = torch.arange(start, end) > positions[:, None]
            scores = scores.masked_fill(mask[:, None], -torch.inf)
            new_maximum = torch.maximum(maximum, scores.amax(dim=2))
            decay = torch.exp(maximum - new_maximum)
            weights = torch.exp(scores - new_maximum[..., None])
            total = total * decay + weights.sum(dim=2)
            out = out * decay[..., None] + weights @ v.double()
            maximum = new_maximum
        return (out / total[..., None]).flatten(1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE to (N, H, D); dimension i is paired with i + D / 2."""
        angles = (positions.float()[:, None] * self._frequencies).double()[:, None]
        first, second = x.chunk(2, dim=2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean = x.square().mean(dim=1, keepdim=True)
        return x * torch.rsqrt(mean + self._epsilon) * self._weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T


def _key_blocks(end: int) -> Iterator[tuple[int, int]]:
    for start in range(0, end, _KEY_BLOCK):
        yield start, min(start + _KEY_BLOCK, end)
