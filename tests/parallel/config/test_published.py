"""Published models by their config.json: size, KV per token and context are as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import parameter_count


def decoder(
    model_type: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int],
    vocab: int,
    **fields: Any,
) -> dict[str, Any]:
    """Return the fields of a config.json; `heads` are those of queries, and of keys and values."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **fields,
    }


MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
HUNYUAN_ROPE = {
    "type": "dynamic",
    "alpha": 1000.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
OLMO_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
GEMMA_ROPE = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA_27B = decoder("gemma3_text", 62, 5376, 21_504, (32, 16), 262_208, head_dim=128)
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Return the fields of a gpt-oss's config.json."""
    return {
        **decoder("gpt_oss", layers, 2880, 2880, (64, 8), 201_088, head_dim=64),
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131_072,
        "initial_context_length": 4096,
        "rope_scaling": GPT_OSS_ROPE,
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
    }


def gemma4(
    layers: int, hidden: int, intermediate: int, heads: tuple[int, int], global_kv_heads: int
) -> dict[str, Any]:
    """Return the fields of the text model in a Gemma 4's config.json."""
    return {
        **decoder("gemma4_text", layers, hidden, intermediate, heads, 262_144, head_dim=256),
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * (layers // 6),
        "max_position_embeddings": 262_144,
        "num_global_key_value_heads": global_kv_heads,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
    }


def without_predictor(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that does not speak of a multi-token-prediction block."""
    return {name: each for name, each in config.items() if not name.startswith("mtp_")}


def qwen3_5(
    kind: str,
    layers: int,
    hidden: int,
    intermediate: int | None,
    heads: tuple[int, int],
    value_heads: int,
    **fields: Any,
) -> dict[str, Any]:
    """Return the fields of a text model with gated delta nets in three of four layers."""
    config = decoder(kind, layers, hidden, intermediate or 0, heads, 248_320, head_dim=256)
    if intermediate is None:
        del config["intermediate_size"]
    return {
        **config,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
            "rope_type": "default",
        },
        **fields,
    }


QWEN_EXPERTS = {
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
# fields, billions of weights, KV bytes per token in 16 bits of layers without a window, and context
PUBLISHED: dict[str, tuple[dict[str, Any], float, int, int]] = {
    "Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "text_config": decoder("mistral", 40, 5120, 32_768, (32, 8), 131_072)
            | {"head_dim": 128, "sliding_window": None, "max_position_embeddings": 131_072},
            "vision_config": {"model_type": "pixtral"},
        },
        23.57,
        163_840,
        131_072,
    ),
    "Ministral-3-8B": (
        {
            "model_type": "mistral3",
            "text_config": decoder("ministral3", 34, 4096, 14_336, (32, 8), 131_072)
            | {"rope_parameters": MINISTRAL_ROPE, "max_position_embeddings": 262_144},
        },
        8.49,
        139_264,
        262_144,
    ),
    "Qwen2.5-VL-7B": (
        decoder("qwen2_5_vl", 28, 3584, 18_944, (28, 4), 152_064)
        | {"max_position_embeddings": 128_000, "use_sliding_window": False}
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        7.62,
        57_344,
        128_000,
    ),
    "Qwen3-VL-8B": (
        {
            "model_type": "qwen3_vl",
            "text_config": decoder("qwen3_vl_text", 36, 4096, 12_288, (32, 8), 151_936)
            | {"head_dim": 128, "max_position_embeddings": 262_144},
            "tie_word_embeddings": False,
        },
        8.19,
        147_456,
        262_144,
    ),
    "InternLM2-7B": (
        decoder("internlm2", 32, 4096, 14_336, (32, 8), 92_544, bias=False)
        | {"max_position_embeddings": 32_768, "auto_map": {"AutoConfig": "x.X"}}
        | {"rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        7.74,
        131_072,
        65_536,
    ),
    "InternLM2.5-7B-chat-1M": (
        decoder("internlm2", 32, 4096, 14_336, (32, 8), 92_544, bias=False)
        | {"max_position_embeddings": 262_144, "auto_map": {"AutoConfig": "x.X"}}
        | {"rope_theta": 5e7, "rope_scaling": {"type": "dynamic", "factor": 2.5}},
        7.74,
        131_072,
        655_360,
    ),
    "InternLM3-8B": (
        decoder("internlm3", 48, 4096, 10_240, (32, 2), 128_512, qkv_bias=False, bias=False)
        | {"max_position_embeddings": 32_768, "auto_map": {"AutoConfig": "x.X"}}
        | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
        8.80,
        49_152,
        196_608,
    ),
    "MiMo-7B": (
        decoder("mimo", 36, 4096, 11_008, (32, 8), 151_680, attention_bias=True)
        | {"max_position_embeddings": 32_768, "num_nextn_predict_layers": 1, "head_dim": 128},
        7.62,
        147_456,
        32_768,
    ),
    "Hunyuan-7B": (
        decoder("hunyuan_v1_dense", 32, 4096, 14_336, (32, 8), 128_167, head_dim=128)
        | {"max_position_embeddings": 32_768, "tie_word_embeddings": True, "use_qk_norm": True}
        | {"use_cla": False, "rope_theta": 1e4, "rope_scaling": HUNYUAN_ROPE},
        7.50,
        131_072,
        32_768,
    ),
    "Seed-OSS-36B": (
        decoder("seed_oss", 64, 5120, 27_648, (80, 8), 155_136, head_dim=128)
        | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
        | {"max_position_embeddings": 524_288, "rope_theta": 1e7},
        36.15,
        262_144,
        524_288,
    ),
    "EXAONE-3.5-7.8B": (
        {
            "model_type": "exaone",
            "activation_function": "silu",
            "auto_map": {"AutoConfig": "x.X"},
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 32_768,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_layers": 32,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "vocab_size": 102_400,
        },
        7.82,
        131_072,
        32_768,
    ),
    "EXAONE-4.0-1.2B": (
        decoder("exaone4", 30, 2048, 4096, (32, 8), 102_400, head_dim=64)
        | {"tie_word_embeddings": True, "sliding_window": None, "sliding_window_pattern": None}
        | {"max_position_embeddings": 65_536},
        1.28,
        61_440,
        65_536,
    ),
    "Gemma-4-31B": (
        {"model_type": "gemma4", "text_config": gemma4(60, 5376, 21_504, (32, 16), 4)},
        30.70,
        81_920,
        262_144,
    ),
    "Gemma-4-26B-A4B": (
        {
            "model_type": "gemma4",
            "text_config": gemma4(30, 2816, 2112, (16, 8), 2)
            | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
            | {"moe_intermediate_size": 704},
        },
        25.23,
        20_480,
        262_144,
    ),
    "Qwen3.5-9B": (
        {
            "model_type": "qwen3_5",
            "text_config": qwen3_5("qwen3_5_text", 32, 4096, 12_288, (16, 4), 32),
            "vision_config": {"model_type": "qwen3_5"},
        },
        8.95,
        32_768,
        262_144,
    ),
    "Qwen3.5-27B": (
        {
            "model_type": "qwen3_5",
            "text_config": qwen3_5("qwen3_5_text", 64, 5120, 17_408, (24, 4), 48),
        },
        26.90,
        65_536,
        262_144,
    ),
    "Qwen3.5-35B-A3B": (
        {
            "model_type": "qwen3_5_moe",
            "text_config": qwen3_5("qwen3_5_moe_text", 40, 2048, None, (16, 2), 32, **QWEN_EXPERTS),
        },
        34.66,
        20_480,
        262_144,
    ),
    "Qwen3-Next-80B-A3B": (
        without_predictor(qwen3_5("qwen3_next", 48, 2048, 5120, (16, 2), 32, **QWEN_EXPERTS))
        | {"vocab_size": 151_936, "num_experts": 512, "num_experts_per_tok": 10}
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        | {"partial_rotary_factor": 0.25, "rope_parameters": None, "rope_theta": 1e7},
        79.67,
        24_576,
        262_144,
    ),
    "gpt-oss-20b": (gpt_oss(24, 32), 20.91, 24_576, 131_072),
    "gpt-oss-120b": (gpt_oss(36, 128), 116.83, 36_864, 131_072),
    "Granite-4.0-micro": (
        decoder("granitemoehybrid", 40, 2560, 8192, (40, 8), 100_352, mamba_d_state=256)
        | {"shared_intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
        | {"tie_word_embeddings": True, "max_position_embeddings": 131_072}
        | {"mamba_n_heads": 128, "mamba_d_head": 40, "mamba_expand": 2},
        3.40,
        81_920,
        131_072,
    ),
    "Granite-4.0-H-Tiny": (
        decoder("granitemoehybrid", 40, 1536, 512, (12, 4), 100_352, mamba_d_state=128)
        | {"shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6}
        | {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}
        | {"tie_word_embeddings": True, "max_position_embeddings": 131_072}
        | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_expand": 2, "mamba_n_groups": 1}
        | {"mamba_d_conv": 4, "position_embedding_type": "nope"},
        6.94,
        8192,
        131_072,
    ),
    "Nemotron-Nano-9B-v2": (
        decoder("nemotron_h", 56, 4480, 15_680, (40, 8), 131_072, head_dim=128)
        | {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}
        | {"mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128}
        | {"mlp_hidden_act": "relu2", "time_step_limit": [0.0, float("inf")], "expand": 2}
        | {"max_position_embeddings": 131_072, "use_conv_bias": True, "use_bias": False},
        8.89,
        16_384,
        131_072,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        decoder("nemotron_h", 52, 2688, 1856, (32, 2), 131_072, head_dim=128)
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
        | {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"mlp_hidden_act": "relu2", "max_position_embeddings": 262_144},
        31.58,
        6_144,
        262_144,
    ),
    "GLM-4-9B-chat-1M": (
        decoder("glm", 40, 4096, 13_696, (32, 4), 151_552, attention_bias=True)
        | {"max_position_embeddings": 1_048_576, "partial_rotary_factor": 0.5},
        9.48,
        81_920,
        1_048_576,
    ),
    "GLM-4-32B-0414": (
        decoder("glm4", 61, 6144, 23_040, (48, 2), 151_552, attention_bias=False)
        | {"max_position_embeddings": 32_768, "partial_rotary_factor": 0.5},
        32.57,
        62_464,
        32_768,
    ),
    "Falcon3-10B": (
        decoder("llama", 40, 3072, 23_040, (12, 4), 131_072, head_dim=256)
        | {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6},
        10.31,
        163_840,
        32_768,
    ),
    "Gemma-3-270M": (
        decoder("gemma3_text", 18, 640, 2048, (4, 1), 262_144, head_dim=256, sliding_window=512)
        | {"tie_word_embeddings": True, "max_position_embeddings": 32_768},
        0.268,
        3_072,
        32_768,
    ),
    "Gemma-3-1B": (
        decoder("gemma3_text", 26, 1152, 6912, (4, 1), 262_144, head_dim=256, sliding_window=512)
        | {"tie_word_embeddings": True, "max_position_embeddings": 32_768},
        1.000,
        4_096,
        32_768,
    ),
    "Gemma-3-4B": (
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                **GEMMA_ROPE,
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        3.880,
        20_480,
        131_072,
    ),
    "Gemma-3-27B": (
        {
            "model_type": "gemma3",
            "text_config": GEMMA_27B
            | {"tie_word_embeddings": True, "query_pre_attn_scalar": 168, **GEMMA_ROPE}
            | {"sliding_window": 1024},
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        27.009,
        81_920,
        131_072,
    ),
    "Mistral-7B-v0.1": (
        decoder("mistral", 32, 4096, 14_336, (32, 8), 32_000, sliding_window=4096)
        | {"max_position_embeddings": 32_768},
        7.24,
        0,
        32_768,
    ),
    "Phi-3-mini-4k": (
        decoder("phi3", 32, 3072, 8192, (32, 32), 32_064, sliding_window=2047)
        | {"max_position_embeddings": 4096},
        3.82,
        0,
        4096,
    ),
    "Command-R7B": (
        decoder("cohere2", 32, 4096, 14_336, (32, 8), 256_000, sliding_window=4096)
        | {"tie_word_embeddings": True, "max_position_embeddings": 132_096, "rope_theta": 5e4}
        | {"sliding_window_pattern": 4, "logit_scale": 0.25, "layer_norm_eps": 1e-5},
        8.03,
        32_768,
        132_096,
    ),
    "Command-R-35B": (
        decoder("cohere", 40, 8192, 22_528, (64, 64), 256_000, use_qk_norm=False)
        | {"tie_word_embeddings": True, "max_position_embeddings": 131_072, "rope_theta": 8e6},
        34.98,
        1_310_720,
        131_072,
    ),
    "Olmo-3-7B": (
        decoder("olmo3", 32, 4096, 11_008, (32, 32), 100_278, sliding_window=4096)
        | {"max_position_embeddings": 65_536}
        | {"rope_theta": 5e5, "rope_scaling": OLMO_ROPE},
        7.30,
        131_072,
        65_536,
    ),
    "EXAONE-4.0-32B": (
        decoder("exaone4", 64, 5120, 27_392, (40, 8), 102_400, head_dim=128)
        | {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}
        | {"max_position_embeddings": 131_072, "rope_theta": 1e6},
        32.00,
        65_536,
        131_072,
    ),
    "AFM-4.5B": (
        decoder("arcee", 36, 2560, 18_432, (20, 4), 128_004, hidden_act="relu2", head_dim=128)
        | {"max_position_embeddings": 65_536},
        4.62,
        73_728,
        65_536,
    ),
    "Apertus-8B": (
        decoder("apertus", 32, 4096, 21_504, (32, 8), 131_072, hidden_act="xielu")
        | {"max_position_embeddings": 65_536, "rope_theta": 12e6, "rope_scaling": LLAMA3_ROPE},
        8.05,
        131_072,
        65_536,
    ),
    "ERNIE-4.5-0.3B": (
        decoder("ernie4_5", 18, 1024, 3072, (16, 2), 103_424, head_dim=128, use_bias=False)
        | {"tie_word_embeddings": True, "max_position_embeddings": 131_072, "rope_theta": 5e5},
        0.36,
        18_432,
        131_072,
    ),
    "ERNIE-4.5-21B-A3B": (
        decoder("ernie4_5_moe", 28, 2560, 12_288, (20, 4), 103_424, use_bias=False)
        | {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2}
        | {"moe_intermediate_size": 1536, "moe_layer_start_index": 1, "moe_layer_interval": 1}
        | {"tie_word_embeddings": True, "max_position_embeddings": 131_072, "rope_theta": 5e5},
        21.83,
        57_344,
        131_072,
    ),
    "GLM-4.5-Air": (  # without its block that predicts further tokens
        decoder("glm4_moe", 46, 4096, 10_944, (96, 8), 151_552, head_dim=128)
        | {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
        | {"num_nextn_predict_layers": 1, "max_position_embeddings": 131_072, "rope_theta": 1e6},
        106.85,
        188_416,
        131_072,
    ),
    "GLM-4.7-Flash": (  # without its block that predicts further tokens
        decoder("glm4_moe_lite", 47, 2048, 10_240, (20, 20), 154_880, q_lora_rank=768)
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc"}
        | {"norm_topk_prob": True, "attention_bias": False, "partial_rotary_factor": 1.0}
        | {"num_nextn_predict_layers": 1, "max_position_embeddings": 202_752, "rope_theta": 1e6},
        29.94,
        54_144,
        202_752,
    ),
    "DeepSeek-V2-Lite": (
        decoder("deepseek_v2", 27, 2048, 10_944, (16, 16), 102_400, q_lora_rank=None)
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
        | {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1}
        | {"max_position_embeddings": 163_840, "auto_map": {"AutoConfig": "x.X"}}
        | {"rope_theta": 1e4, "rope_scaling": DEEPSEEK_ROPE},
        15.71,
        31_104,
        163_840,
    ),
    "MiniCPM3-4B": (
        decoder("minicpm3", 62, 2560, 6400, (40, 40), 73_448, q_lora_rank=768)
        | {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}
        | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
        | {"max_position_embeddings": 32_768, "tie_word_embeddings": True}
        | {"auto_map": {"AutoConfig": "x.X"}},
        4.07,
        35_712,
        32_768,
    ),
    "Yi-34B-200K": (
        decoder("llama", 60, 7168, 20_480, (56, 8), 64_000) | {"max_position_embeddings": 200_000},
        34.39,
        245_760,
        200_000,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_and_context(name: str, tmp_path: Path) -> None:
    fields, billions, kv_bytes, context = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_name(str(tmp_path))
    assert config == ModelConfig.from_pretrained(tmp_path)
    assert parameter_count(config, 1) / 1e9 == pytest.approx(billions, abs=0.01)
    planes = config.kv_layout(1, torch.bfloat16).planes
    assert 2 * planes * config.full_layers * config.kv_heads * config.head_dim == kv_bytes
    assert config.context_limit == context
    assert config.has_predictor == config.has_output_gates
