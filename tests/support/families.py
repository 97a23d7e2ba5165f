"""One tiny model of every family that differs from Llama in more than its sizes."""

from __future__ import annotations

from typing import Any

from support.models import MAMBA, long_rope

# arguments of `build_checkpoint`
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "head_dim": 12},
    "qwen3": {"family": "qwen3"},
    "smollm3": {"family": "smollm3"},
    # half of a head's dimensions rotate, and the long factors apply after 32 tokens
    "phi3": {
        "family": "phi3",
        "rope_parameters": long_rope(4, partial_rotary_factor=0.5),
        "original_max_position_embeddings": 32,
    },
    "olmo2": {"family": "olmo2"},
    "granite": {"family": "granite"},
    "qwen3_moe": {"family": "qwen3_moe", "norm_topk_prob": True},
    "mixtral": {"family": "mixtral"},
    "exaone4": {"family": "exaone4"},
    "exaone": {"family": "exaone"},
    "granitemoehybrid": {"family": "granitemoehybrid"},
    "granite-mamba": {"family": "granitemoehybrid", **MAMBA},
    "nemotron_h": {"family": "nemotron_h"},
    "granite-experts": {
        "family": "granitemoehybrid",
        **MAMBA,
        "position_embedding_type": "nope",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_n_groups": 2,
    },
    "ministral3": {"family": "ministral3"},  # queries are scaled from 16 tokens on
    "seed_oss": {"family": "seed_oss"},
    "arcee": {"family": "arcee"},
    "apertus": {"family": "apertus"},
    "ernie4_5": {"family": "ernie4_5"},
    "ernie4_5_moe": {"family": "ernie4_5_moe"},
    "glm4_moe": {"family": "glm4_moe", "seed": 1},
    "deepseek_v2": {"family": "deepseek_v2"},
    "deepseek_v3": {"family": "deepseek_v3"},
    "glm4_moe_lite": {"family": "glm4_moe_lite", "seed": 1},
    "minicpm3": {"family": "minicpm3"},
    "hunyuan": {"family": "hunyuan_v1_dense"},
    "glm": {"family": "glm", "seed": 1},
    "glm4": {"family": "glm4"},
    # layers with a window, all of them or all but the second of three
    "mistral-window": {"family": "mistral", "sliding_window": 24, "seed": 1},
    "exaone4-window": {
        "family": "exaone4",
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3_text": {"family": "gemma3_text"},
    "olmo3": {"family": "olmo3"},
    "cohere2": {"family": "cohere2", "seed": 5},
    "gemma4_text": {"family": "gemma4_text"},
    "gemma4-experts": {
        "family": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "seed": 1,
    },
    "gpt_oss": {"family": "gpt_oss", "seed": 5},
    "qwen3_next": {"family": "qwen3_next"},
    "qwen3_5": {"family": "qwen3_5_text"},
    "qwen3_5_moe": {"family": "qwen3_5_moe_text"},
}
