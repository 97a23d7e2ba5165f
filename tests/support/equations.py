"""Llama's equations at single positions of a long text, in float64, straight from the weights.

It shares nothing with the engine, for it is what the engine is held against. One key/value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

_PIECE = 16_384  # keys at a time

# returns the keys and values (N, D) from one position to another of a layer
KeysAndValues = Callable[[int, int], tuple[Tensor, Tensor]]


class Equations:
    """A Llama with one key/value head, whose weights are the checkpoint's in float64."""

    def __init__(self, folder: Path):
        config: Any = LlamaConfig.from_pretrained(folder)
        assert config.num_key_value_heads == 1
        weights = load_file(folder / "model.safetensors")
        self._weights = {
            name.removeprefix("model."): each.double() for name, each in weights.items()
        }
        self._heads, self._width = config.num_attention_heads, config.head_dim
        self._epsilon = config.rms_norm_eps
        # positions turn by angles of float32, as in every implementation: at a million they are
        # rounded to 0.03, which is part of what the model is
        halves = torch.arange(0, self._width, 2).float() / self._width
        self._frequencies = 1 / config.rope_parameters["rope_theta"] ** halves

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what enters the first layer, (N, hidden)."""
        return self._weights["embed_tokens.weight"][tokens]

    def kv(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, rotated, and values (N, D) of what enters a layer."""
        normed = self._norm(f"layers.{layer}.input_layernorm", hidden)
        keys = self._product(f"layers.{layer}.self_attn.k_proj", normed)
        values = self._product(f"layers.{layer}.self_attn.v_proj", normed)
        return self._rotated(keys[:, None], positions)[:, 0], values

    def layer(self, layer: int, hidden: Tensor, positions: Tensor, keys: KeysAndValues) -> Tensor:
        """Return what leaves a layer (P, hidden), of what enters it at `positions` (P,)."""
        name = f"layers.{layer}"
        normed = self._norm(f"{name}.input_layernorm", hidden)
        queries = self._product(f"{name}.self_attn.q_proj", normed)
        queries = queries.unflatten(1, (self._heads, self._width))
        heads = self._attended(self._rotated(queries, positions), positions, keys)
        hidden = hidden + self._product(f"{name}.self_attn.o_proj", heads)
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self._product(f"{name}.mlp.gate_proj", normed))
        up = self._product(f"{name}.mlp.up_proj", normed)
        return hidden + self._product(f"{name}.mlp.down_proj", gate * up)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (P, V) of what leaves the last layer."""
        return self._norm("norm", hidden) @ self._weights["lm_head.weight"].T

    def _attended(self, queries: Tensor, positions: Tensor, keys: KeysAndValues) -> Tensor:
        """Attend with (P, H, D) to all keys up to each position; return (P, H * D).

        Piece by piece with a running maximum (Milakov and Gimelshein, arXiv 1805.02867).
        """
        maximum = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float64)
        total = torch.zeros_like(maximum)
        out = torch.zeros_like(queries)
        for start, end in _pieces(int(positions.max()) + 1):
            k, v = keys(start, end)
            scores = queries @ k.double().T / self._width**0.5
            later = torch.arange(start, end) > positions[:, None]
            scores = scores.masked_fill(later[:, None], -torch.inf)
            higher = torch.maximum(maximum, scores.amax(dim=2))
            kept = torch.exp(maximum - higher)
            weights = torch.exp(scores - higher[..., None])
            total = total * kept + weights.sum(dim=2)
            out = out * kept[..., None] + weights @ v.double()
            maximum = higher
        return (out / total[..., None]).flatten(1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn (N, H, D) by position, each dimension with the one half a head further."""
        angles = (positions.float()[:, None] * self._frequencies).double()[:, None]
        first, second = x.chunk(2, dim=2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean = x.square().mean(dim=1, keepdim=True)
        return x * torch.rsqrt(mean + self._epsilon) * self._weights[f"{name}.weight"]

    def _product(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T


def _pieces(end: int) -> Iterator[tuple[int, int]]:
    for start in range(0, end, _PIECE):
        yield start, min(start + _PIECE, end)
