"""Errors name every unsupported feature; the cases are excerpts of published configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.config.families import FAMILIES
from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 32_768,
}
WINDOWS = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {"mamba_d_state": 256, "mamba_n_heads": 48}
GRANITE = {**HYBRID, "num_local_experts": 0, "shared_intermediate_size": 96}
CODE = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}


def error_message(folder: Path, **fields: Any) -> str:
    """Return the error message for a config, which is the same from a plan and from an engine."""
    (folder / "config.json").write_text(json.dumps({**DIMENSIONS, **fields}))
    messages = set()
    for read in (ModelConfig.from_pretrained, lambda folder: ModelConfig.from_name(str(folder))):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            read(folder)
        messages.add(str(caught.value))
    (message,) = messages
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}},
            ["Its text model is 'qwen2', which is supported, but not within this wrapper"],
        ),
        (
            {"model_type": "gemma9", "text_config": {"model_type": "gemma9_text", **WINDOWS}},
            ["'gemma9_text', which is not supported either", "sliding_window = 128"],
        ),
        (
            {
                "model_type": "olmo_hybrid",
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 16,
            },
            ["linear_num_key_heads = 16 (linear attention)", "layer_types with linear_attention"],
        ),
        (
            {
                "model_type": "mimo_v2_flash",
                "add_swa_attention_sink_bias": True,
                "quantization_config": {"quant_method": "exl3"},
                **WINDOWS,
            },
            [
                "It has add_swa_attention_sink_bias = true (attention sinks), sliding_window = 128 "
                "(sliding-window attention) and weights quantised by EXL3."
            ],
        ),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "sliding_window": 4096},
            ["(soft-capped attention) and sliding_window = 4096 (sliding-window attention)"],
        ),
        (
            {"model_type": "olmo9", "layer_types": WINDOWS["layer_types"]},
            ["layer_types with sliding_attention (sliding-window attention)"],
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "conv"]}
            | {**GRANITE, "mamba_conv_bias": False, "mamba_proj_bias": True},
            [
                "mamba_conv_bias = false (convolutions without biases), mamba_proj_bias = true "
                "(biases of projections)"
            ],
        ),
        (
            {"model_type": "bamba", **HYBRID, "layer_types": ["mamba", "attention"]},
            ["mamba_d_state = 256 (recurrent layers)", "layer_types with mamba"],
        ),
        (
            {"model_type": "zamba2", "layers_block_type": ["hybrid", "linear_attention"], **HYBRID},
            ["mamba_d_state = 256 (recurrent layers)", "with hybrid, linear_attention"],
        ),
        ({"model_type": "jamba", **HYBRID}, ["mamba_d_state = 256 (recurrent layers)"]),
        (
            {"model_type": "exaone", "activation_function": "gelu"},
            ["activation 'gelu' is not supported"],
        ),
        (
            {"model_type": "hunyuan_v1_dense", "use_cla": True, "use_qk_norm": True},
            ["has use_cla = true (layers that share keys and values), which is not supported"],
        ),
        ({"model_type": "internlm9", **CODE}, ["model_type 'internlm9'", "would run code"]),
        ({"model_type": "internlm3", "bias": True}, ["qkv_bias and bias of different values"]),
        (
            {"model_type": "llama", "sliding_window": 4096},
            ["sliding-window attention (sliding_window = 4096, of 32768 positions) is not "],
        ),
        (
            {"model_type": "deepseek_v32", "kv_lora_rank": 512, **CODE},
            ["kv_lora_rank = 512 (multi-latent attention)", "would run code"],
        ),
        (
            {"model_type": "kimi_k2", "kv_lora_rank": 512, **CODE}
            | {"quantization_config": {"quant_method": "hqq"}},
            [
                "It has kv_lora_rank = 512 (multi-latent attention) and weights quantised by "
                "HQQ. It would run code"
            ],
        ),
        ({"model_type": "chatglm", **CODE}, ["names end in -hf, need no such code"]),
        ({"model_type": "Yi", **CODE}, ["fetch the repository's newer revision"]),
        (
            {"model_type": "mistral", "quantization_config": {"bits": 4}, "sliding_window": 4096},
            ["has weights quantised by an un"],
        ),
        (
            {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}},
            ["has weights quantised by MLX (use a GGUF file, or an AWQ, GPTQ, compressed-tensors"],
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_every_unsupported_feature_is_named(
    fields: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    message = error_message(tmp_path, **fields)
    for part in parts:
        assert part in message
    is_known = fields["model_type"] in (*FAMILIES, "exaone", "internlm3")
    assert ("is not supported; supported are llama" in message) != is_known


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "zamba9", "layer_types": ["attention"] * 2, **HYBRID},
        {"model_type": "qwen9", "use_sliding_window": False, "sliding_window": 128},
        {"model_type": "qwen9", "sliding_window": 32_768},
        {"model_type": "qwen9", "sliding_window": None, "quantization_config": None},
    ],
    ids=str,
)
def test_features_without_effect_are_not_named(fields: dict[str, Any], tmp_path: Path) -> None:
    assert error_message(tmp_path, **fields).endswith("exaone, internlm2, internlm3, mimo.")
