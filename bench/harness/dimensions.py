"""Dimensions of the models that published figures are of: what they cost follows from these
alone.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from parallel.config import ModelConfig

Dimensions = dict[str, Any]
POSITIONS: Dimensions = {
    "max_position_embeddings": 1 << 17,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
LLAMA_68M = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3_072,
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
}
LLAMA_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
LLAMA_13B = {
    "vocab_size": 32_000,
    "hidden_size": 5_120,
    "intermediate_size": 13_824,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
}


def config_of(dimensions: Dimensions) -> ModelConfig:
    return ModelConfig.from_hf(LlamaConfig(**POSITIONS, **dimensions))
