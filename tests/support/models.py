"""Tiny random checkpoints of every supported family, and their logits by transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 101,  # odd: never divisible among ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# a config without a checkpoint
DIMENSIONS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 300,
}
# the second of three layers has attention, the others Mamba-2
MAMBA: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_head": "auto",
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
# the second of three layers has full attention, the others a gated delta net
DELTA_NETS: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
    "pad_token_id": None,
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "pad_token_id": None,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 12},
    # the second of three layers has no RoPE
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": False, "pad_token_id": None},
    # the second of three layers has experts
    "qwen3_moe": {
        "head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "decoder_sparse_step": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": {**DELTA_NETS, **SHARED_EXPERT},
    "qwen3_next": {**DELTA_NETS, **SHARED_EXPERT},
    "phi3": {"pad_token_id": None},
    "olmo2": {"pad_token_id": None},
    "exaone4": {
        "head_dim": 12,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "pad_token_id": None,
    },
    "exaone": {
        "head_dim": 12,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "granitemoehybrid": {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 56,
        "position_embedding_type": "rope",
        "mamba_n_heads": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "ministral3": {
        "head_dim": 12,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "gpt_oss": {
        "head_dim": 12,
        "sliding_window": 20,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "seed_oss": {"head_dim": 12, "pad_token_id": None},
    "hunyuan_v1_dense": {
        "head_dim": 12,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10_000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    # the second of three layers has no window
    "gemma3_text": {
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "pad_token_id": None,
    },
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        "pad_token_id": None,
    },
    "cohere": {"logit_scale": 0.7, "tie_word_embeddings": True, "pad_token_id": None},
    "cohere2": {
        "logit_scale": 0.7,
        "tie_word_embeddings": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": None,
    },
    "olmo3": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
        "pad_token_id": None,
    },
    "apertus": {"pad_token_id": None, "rope_parameters": None},
    "ernie4_5": {"head_dim": 12, "pad_token_id": None},
    # the first of three layers has no experts
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "pad_token_id": None,
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
        "use_qk_norm": True,
    },
    "deepseek_v2": {**LATENTS, **ROUTED, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **LATENTS,
        **ROUTED,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "num_mtp_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe_lite": {**LATENTS, **ROUTED},
    "minicpm3": {**LATENTS, "scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 16},
    "glm": {"head_dim": 16, "pad_token_id": None, "eos_token_id": 2},
    "glm4": {"head_dim": 16, "pad_token_id": None, "eos_token_id": 2},
    # mixers and MLPs are layers of their own; the last of three mixers has no MLP
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "head_dim": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
}


OFFSET_NORMS = ("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # stored less 1


def rope(kind: str, theta: float = 10_000.0, **parameters: Any) -> dict[str, Any]:
    """Return a config's `rope_parameters`."""
    return {"rope_type": kind, "rope_theta": theta, **parameters}


def long_rope(dimensions: int, **parameters: Any) -> dict[str, Any]:
    """Return `rope_parameters` of LongRoPE for heads with so many rotated dimensions."""
    short = [1.0 + 0.1 * index for index in range(dimensions // 2)]
    long = [2.0 + index for index in range(dimensions // 2)]
    return rope("longrope", short_factor=short, long_factor=long, **parameters)


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """Return a transformers config of a few thousand parameters; `overrides` replaces fields."""
    return AutoConfig.for_model(family, **{**TINY, **FAMILY_FIELDS.get(family, {}), **overrides})


# Arguments of `build_checkpoint` for matrices to quantise: rows are whole blocks of 256, and two
# ranks split the columns of `down` inside of such a block.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "scale": 0.05,
}


def build_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    scale: float = 0.15,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint to `folder`, as transformers does, and return it.

    Every parameter is drawn again, since transformers initializes biases with zero. `scale` is the
    standard deviation of the weights: the greater, the further from uniform the model's
    distributions are.
    """
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            has_offset = family in OFFSET_NORMS and "linear_attn" not in name
            is_scale = "norm" in name and not has_offset
            parameter.copy_(1 + noise if is_scale else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(1, generator=generator) * scale)
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * scale)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of a checkpoint of one file, and return its folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    return folder


def random_tokens(count: int, vocab: int = TINY["vocab_size"], seed: int = 0) -> Tensor:
    """Return uniformly drawn tokens, (count,) int64."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def reference_logits(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits (T, V) float32 of tokens (T,) in one forward pass of transformers."""
    return reference_model(folder, dtype)(tokens[None]).logits[0].float()


@lru_cache(maxsize=4)
def reference_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the transformers model in a folder; cached, so the folder must not change."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
