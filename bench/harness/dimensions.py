"""Dimensions of the models in published experiments, which determine their cost."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from parallel.config.model_config import ModelConfig

Dimensions = dict[str, Any]
POSITIONS: Dimensions = {
    "max_position_embeddings": 1 << 17,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def _dimensions(vocab: int, hidden: int, intermediate: int, heads: int, layers: int) -> Dimensions:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }


TINY = _dimensions(512, 128, 256, heads=4, layers=3)
LLAMA_68M = _dimensions(32_000, 768, 3_072, heads=12, layers=2)
LLAMA_7B = _dimensions(32_000, 4_096, 11_008, heads=32, layers=32)
LLAMA_8B = _dimensions(128_256, 4_096, 14_336, heads=32, layers=32) | {"num_key_value_heads": 8}
LLAMA_13B = _dimensions(32_000, 5_120, 13_824, heads=40, layers=40)


def config_of(dimensions: Dimensions) -> ModelConfig:
    """Return the configuration of a Llama with these dimensions."""
    return ModelConfig.from_hf(LlamaConfig(**POSITIONS, **dimensions))
