"""A config read without transformers equals the one transformers reads, whatever is left out."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from parallel.config.model_config import FAMILIES, ConfigError, ModelConfig
from parallel.config.rope import inverse_frequencies
from support.models import long_rope, rope
from support.slow import slow_except

NEEDED = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 300,
}
OPTIONAL: dict[str, tuple[Any, ...]] = {  # values that a field may have, unless it is absent
    "num_key_value_heads": (None, 1, 4, 8),
    "head_dim": (None, 16),
    "rms_norm_eps": (1e-5,),
    "max_position_embeddings": (1024, 65_536),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "eos_token_id": (None, 7, [7, 8]),
    "dtype": ("bfloat16", "float32", "half"),
    "torch_dtype": ("float16",),
    "hidden_act": ("silu",),
    "rope_theta": (10_000, 1e6),
    "original_max_position_embeddings": (256,),
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "finetuned": True},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 128, "rope_theta": 5e5},
    long_rope(8),
    long_rope(8, factor=4.0, original_max_position_embeddings=128),
)
PHI3_ROPES = (
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    long_rope(8),
    {**long_rope(4), "type": "su", "partial_rotary_factor": 0.5},
    {**long_rope(8), "rope_type": "yarn", "attention_factor": 1.2},
)
MIXTURE = {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "moe_intermediate_size": 24,
}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1}
LATENTS = {
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
V2 = {
    **LATENTS,
    **ROUTED,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
}
GPT_OSS_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=128, truncate=3)
FAMILY_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3": {"layer_types": (["full_attention"] * 2,), "head_dim": (16,)},
    "smollm3": {
        "no_rope_layers": ([1, 0], [0, 0]),
        "no_rope_layer_interval": (1, 2, 4),
        "layer_types": (["full_attention"] * 2,),
    },
    "granite": {
        "embedding_multiplier": (12.0,),
        "residual_multiplier": (0.22,),
        "attention_multiplier": (0.0078125,),
        "logits_scaling": (16, 8.0),
    },
    "qwen3_moe": {
        "norm_topk_prob": (True, False),
        "mlp_only_layers": ([], [0]),
        "decoder_sparse_step": (1, 2, 3),
        "num_key_value_heads": (1, 8),
        "head_dim": (16,),
    },
    "mixtral": {"num_local_experts": (4,)},
    "qwen2": {"max_window_layers": (0, 1, 28), "sliding_window": (100, 131_072)},
    "exaone4": {
        "sliding_window": (None, 100, 131_072),
        "layer_types": (["full_attention"] * 2, ["sliding_attention", "full_attention"]),
        "sliding_window_pattern": (2, "LG"),
    },
    "gemma3_text": {
        "sliding_window": (100,),
        "sliding_window_pattern": (2, 6),
        "rope_local_base_freq": (20_000.0,),
        "query_pre_attn_scalar": (168,),
    },
    "cohere2": {
        "sliding_window": (100, 131_072),
        "sliding_window_pattern": (2,),
        "logit_scale": (0.25,),
        "layer_norm_eps": (1e-6,),
    },
    "olmo3": {
        "sliding_window": (100, 131_072),
        "layer_types": (["full_attention"] * 2, ["full_attention", "sliding_attention"]),
    },
    "gemma4_text": {
        "sliding_window": (100,),
        "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2),
        "global_head_dim": (8, 32),
        "num_global_key_value_heads": (None, 2),
        "attention_k_eq_v": (True, False),
        "final_logit_softcapping": (None, 30.0),
        "num_key_value_heads": (1, 8),
        "head_dim": (16,),
        "per_layer_config": ({"1": {"head_dim": 64}}, {"01": {"num_key_value_heads": 4}}, {}),
    },
    "gpt_oss": {
        "sliding_window": (100, 131_072),
        "layer_types": (["full_attention"] * 2, ["full_attention", "sliding_attention"]),
        "swiglu_limit": (5.0,),
        "swiglu_alpha": (1,),
        "attention_bias": (False,),
    },
    "nemotron_h": {
        "layers_block_type": (
            ["linear_attention", "full_attention", "moe"],
            ["mamba", "mlp", "mamba", "attention"],
            ["mlp", "attention"],
            None,
        ),
        "hybrid_override_pattern": ("ME*-M", "M**E", "MX*"),
        "n_groups": (4,),
        "mamba_num_heads": (16,),
        "n_group": (2,),
        "norm_topk_prob": (False,),
        "layer_norm_epsilon": (1e-6,),
    },
    "granitemoehybrid": {
        "position_embedding_type": ("rope", "nope"),
        "embedding_multiplier": (12.0,),
        "layer_types": (["mamba", "attention"], ["linear_attention", "full_attention"]),
        "mamba_n_heads": (4, 8),
        "mamba_n_groups": (2,),
        "mamba_d_head": ("auto", 32),
        "mamba_d_state": (16,),
        "mamba_conv_bias": (True,),
        "time_step_limit": (None, [0.0, {"__float__": "Infinity"}]),
        "num_local_experts": (0, 8),
    },
    "seed_oss": {"attention_out_bias": (True,)},
    "ernie4_5_moe": {
        "moe_layer_start_index": (0, 1),
        "moe_layer_end_index": (-1, 1),
        "moe_layer_interval": (1, 2),
        "moe_num_shared_experts": (0, 2),
        "moe_norm_min": (1e-6,),
    },
    "glm4_moe_lite": {
        "mlp_layer_types": (None, ["sparse", "dense"]),
        "rope_interleave": (True, False),
        "attention_bias": (True,),
    },
    "deepseek_v3": {
        "first_k_dense_replace": (0, 1),
        "n_group": (2,),
        "rope_interleave": (True, False),
        "q_lora_rank": (16,),
    },
    "deepseek_v2": {"routed_scaling_factor": (2.0,), "q_lora_rank": (16,)},
    "minicpm3": {"scale_emb": (6,), "scale_depth": (1.0, None), "dim_model_base": (32, None)},
    "glm4_moe": {
        "first_k_dense_replace": (0, 1, 2),
        "n_group": (1, 2),
        "norm_topk_prob": (True, False),
        "use_qk_norm": (True, False),
        "routed_scaling_factor": (2.5,),
        "num_nextn_predict_layers": (0, 1),
    },
    "glm": {"partial_rotary_factor": (0.25,)},
    "glm4": {"partial_rotary_factor": (1.0,)},
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
SPARSE_HYBRID = {
    **HYBRID,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
ALL = set(range(8))  # layers of a model
HAVE_WINDOWS = ("cohere2", "exaone4", "gemma3_text", "gemma4_text", "gpt_oss", "olmo3")
# fields without which there is no supported model of a family
FAMILY_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gpt_oss": MIXTURE,
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE,
    "ernie4_5_moe": {
        "moe_k": 2,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 24,
    },
    "glm4_moe": {**MIXTURE, **ROUTED},
    "glm4_moe_lite": {**MIXTURE, **ROUTED, **LATENTS},
    "deepseek_v3": {**MIXTURE, **ROUTED, **LATENTS, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {**MIXTURE, **ROUTED, **LATENTS},
    "minicpm3": LATENTS,
    "qwen3_next": SPARSE_HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": SPARSE_HYBRID,
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "granitemoehybrid": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 2,
    },
}


HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # a quarter of a head rotates


def random_config(family: str, draw: random.Random) -> dict[str, Any]:
    """Return a config.json of this family, with a random choice of optional fields."""
    fields = {"model_type": family, **NEEDED, **FAMILY_NEEDED.get(family, {})}
    for name, values in {**OPTIONAL, **FAMILY_FIELDS.get(family, {})}.items():
        if draw.random() < 0.5:
            fields[name] = draw.choice(values)
    if family not in ("llama", *HAVE_WINDOWS) and draw.random() < 0.7:
        fields["sliding_window"] = draw.choice((None, 131_072))
    if draw.random() < 0.3:
        fields["use_sliding_window"] = False
    if family != "gemma4_text" and draw.random() < 0.7:
        forms = ("rope_scaling", "rope_parameters")
        form = draw.choice(forms[: 1 + (family not in ("gemma3_text", "olmo3"))])
        fields[form] = dict(draw.choice(PHI3_ROPES if family == "phi3" else ROPES))
    # combinations that transformers rejects
    strict = {"num_key_value_heads": ("mistral", "mixtral", "ministral3", "exaone4", "glm4")}
    strict["num_key_value_heads"] += (
        "gemma3_text",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "ministral",
        "nemotron_h",
    )
    strict["num_key_value_heads"] += HYBRIDS
    strict["head_dim"] = (
        *HYBRIDS,
        "nemotron_h",
        "ministral3",
        "glm4",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
    )
    for name, families in strict.items():
        if family in families and fields.get(name, 0) is None:
            del fields[name]
    needs_dim = family == "gemma3_text" or fields.get("head_dim") is None
    if "short_factor" in str(fields) and needs_dim:
        fields["head_dim"] = 8
    return fields


def read_both(path: Path) -> list[ModelConfig | str]:
    """Return the config, or the error message, of each of the two entry points."""
    results: list[ModelConfig | str] = []
    for read in (
        lambda: ModelConfig.from_pretrained(path.parent),
        lambda: ModelConfig.from_name(str(path)),
    ):
        try:
            results.append(read())
        except ConfigError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("family", slow_except(FAMILIES, 0, 4, -1))
def test_from_pretrained_and_from_name_agree(family: str, tmp_path: Path) -> None:
    draw, path = random.Random(family), tmp_path / "config.json"
    valid = 0
    for _ in range(150):
        fields = random_config(family, draw)
        path.write_text(json.dumps(fields))
        pretrained, named = read_both(path)
        if isinstance(named, str):  # the messages may differ
            assert isinstance(pretrained, str), (fields, named)
        else:
            assert pretrained == named, fields
            valid += 1
            assert hash(named) == hash(pretrained)
    assert valid > 50


# Gemma 4 has a test of its own, Nemotron-H no RoPE.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma4_text", "nemotron_h"}))
def test_frequencies_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    base = {"model_type": family, **NEEDED, "num_key_value_heads": 4, "sliding_window": None}
    base |= {**MIXTURE, "head_dim": 8, **FAMILY_NEEDED.get(family, {})}
    if family in HAVE_WINDOWS:
        base |= {"sliding_window": 100}
    variants = ({}, {"head_dim": 16}, {"original_max_position_embeddings": 256})
    if FAMILIES[family].has_latents:  # transformers takes it for that of the rotated dimensions
        variants = variants[::2]
    name = family.removesuffix("_text")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    embedding = next(
        vars(module)[name]
        for name in vars(module)
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    )
    ropes = PHI3_ROPES if family == "phi3" else ROPES
    for scaling, fields in itertools.product(ropes, variants):
        has_other_size = "head_dim" in fields or "glm" in family or family in HYBRIDS
        if "short_factor" in scaling and has_other_size:
            continue  # LongRoPE needs one factor per pair of dimensions
        path.write_text(json.dumps({**base, "rope_scaling": scaling, "rope_theta": 5e5, **fields}))
        is_extended = scaling.get("rope_type") in ("yarn", "longrope")
        is_older = "type" in scaling or (
            is_extended and "original_max_position_embeddings" not in scaling
        )
        if family in ("gemma3_text", "olmo3") and is_older:
            continue  # transformers reads it in other families alone
        hf = AutoConfig.from_pretrained(path)
        config = ModelConfig.from_name(str(path))
        layer = {} if config.windowed_rope is None else {"layer_type": "full_attention"}
        kind = hf.rope_parameters.get(layer.get("layer_type"), hf.rope_parameters)["rope_type"]
        for tokens in (100, 200_000):
            if kind == "default":
                expected = embedding.compute_default_rope_parameters(hf, **layer)
            else:
                options = {"seq_len": tokens, **layer}
                expected = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), **options)
            frequencies, factor = config.inverse_frequencies(tokens)
            assert torch.equal(frequencies, expected[0]), (scaling, fields)
            assert factor == expected[1]
        if config.windowed_rope is not None:
            local = {"layer_type": "sliding_attention"}
            expected = embedding.compute_default_rope_parameters(hf, **local)
            own = inverse_frequencies(config.windowed_rope, config.rotary_dim, 512, 100)
            assert torch.equal(own[0], expected[0])


@pytest.mark.parametrize(
    "own",
    [
        None,
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3e5},
        {"rope_type": "proportional", "factor": 8.0, "rope_theta": 3e5},
        rope("default", theta=2e4),
        rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ],
)
def test_frequencies_of_gemma_4_are_those_of_transformers(
    own: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Layers with a window have other heads, and so other frequencies."""
    path = tmp_path / "config.json"
    fields = {"model_type": "gemma4_text", **NEEDED, **FAMILY_NEEDED["gemma4_text"]}
    fields |= {"num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 64}
    if own is not None:
        local = rope("default", theta=500.0)
        fields["rope_parameters"] = {"full_attention": own, "sliding_attention": local}
    path.write_text(json.dumps(fields))
    expected = Gemma4TextRotaryEmbedding(AutoConfig.from_pretrained(path))
    config = ModelConfig.from_name(str(path))
    assert config.windowed_rope is not None
    frequencies, factor = config.inverse_frequencies(100)
    assert torch.equal(frequencies, expected.full_attention_inv_freq)
    assert factor == expected.full_attention_attention_scaling
    windowed, _ = inverse_frequencies(config.windowed_rope, 16, 512, 100)
    assert torch.equal(windowed, expected.sliding_attention_inv_freq)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "evil.X"}}, "would run code"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_hidden_layers": "many"}, "layers = 'many'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0; it must be a whole number"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"rope_theta": "big"}, "rope_theta above 0"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "needs factor above 0"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' needs short_factor, a list of 4"),
        ({"rope_scaling": {**long_rope(6)}}, "'longrope' needs short_factor, a list of 4"),
        ({"rope_scaling": {"type": "su"}}, "'su' is not supported"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one for all layers"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5\) are not supported"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.4}, "of 8 dimensions per head is not"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "softcapping = 50.0 .soft-cap"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"model_type": "deepseek_v32", "kv_lora_rank": 512}, "kv_lora_rank = 512 .multi-latent"),
        ({"model_type": "gpt_oss"}, "lacks num_experts_per_tok, num_experts"),
        ({"model_type": "gpt_oss", **MIXTURE, "swiglu_limit": 0}, "swiglu_limit = 0; it must be"),
        (
            {"model_type": "gpt_oss", **MIXTURE, "rope_scaling": GPT_OSS_ROPE},
            "truncate = 3; it must be true or false",
        ),
        (
            {"model_type": "x", "add_swa_attention_sink_bias": True},
            "'x' is not supported.* It has add_swa_attention_sink_bias = true .attention sinks",
        ),
        ({"model_type": "falcon_mamba", "state_size": 16}, "state_size = 16 .recurrent"),
        ({"quantization_config": {"quant_method": "exl2"}}, "weights quantised by EXL2 .*16-bit"),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]},
            "layer_types with linear_attention",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types with sliding_attention, but no sliding_window that is in use",
        ),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 512},
            "sliding_window = 512, of 32768 positions",
        ),
        ({"model_type": "phi3", "sliding_window": -1}, "sliding_window = -1; it must be"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "activation 'gelu'"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": "LG"},
            r"sliding_window_pattern = 'LG'; it must be a whole number .*0\.$",
        ),
        (
            {"model_type": "olmo3", "rope_scaling": {"full_attention": {"rope_type": "default"}}},
            "rope_scaling = .*; it must be that of full_attention alone",
        ),
        (
            {"model_type": "gemma3_text"}
            | {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "RoPE type 'dynamic', which depends on the length",
        ),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm = true .norms of queries"),
        ({"model_type": "cohere2", "logit_scale": 0}, "logit_scale = 0; it must be"),
        ({"model_type": "minicpm3", **LATENTS, "scale_depth": "1.4"}, "scale_depth = '1.4'"),
        ({"model_type": "minicpm3", **LATENTS, "kv_lora_rank": "24"}, "kv_lora_rank = '24'"),
        ({"model_type": "deepseek_v2", **V2, "v_head_dim": None}, "v_head_dim = None; it must be"),
        ({"model_type": "deepseek_v2", **V2, "topk_method": "x"}, "topk_method = 'x', which is"),
        ({"model_type": "deepseek_v2", **V2, "n_routed_experts": None}, "n_routed_experts = None"),
        (
            {"model_type": "deepseek_v3", **V2, "n_group": 3, "topk_group": 1},
            "8 experts do not divide into so many",
        ),
        (
            {"model_type": "deepseek_v3", **V2, "n_group": 4, "num_experts_per_tok": 3}
            | {"topk_group": 1},
            "topk_group = 1 of 4 groups to a token, which have fewer than its 3 experts",
        ),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 24},
            "lacks num_experts_per_tok, .* qk_rope_head_dim, qk_nope_head_dim, q_lora_rank, v_head",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention = true .attention to later tokens",
        ),
        (
            {"model_type": "exaone4", "sliding_window_pattern": "LXG", "sliding_window": 8},
            "sliding_window_pattern = 'LXG'; it must be a whole .*, or a string of L and G",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "all"},
            "max_window_layers = 'all'",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": None},
            "layer_types with sliding_attention, but no sliding_window",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"rope_type": "default"}},
            "must have those of full_attention and of sliding_attention",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": 7}},
            "rope_parameters of full_attention = 7; they must be an object",
        ),
        ({"model_type": "granite", "attention_multiplier": 0}, "query_multiplier = 0.0"),
        (
            {"model_type": "granitemoehybrid", **FAMILY_NEEDED["granitemoehybrid"]}
            | {"position_embedding_type": ["rope"]},
            "position_embedding_type = .'rope'.; it must be rope",
        ),
        ({"model_type": "mixtral"}, "lacks num_experts_per_tok, num_experts"),
        (
            {"model_type": "qwen3_moe", **MIXTURE, "num_experts_per_tok": 9},
            "9 of 8 experts to a token",
        ),
    ],
    ids=str,
)
def test_from_name_rejects_what_from_pretrained_rejects(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **NEEDED, **fields}))
    with pytest.raises(ConfigError):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_name(str(path))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"model_type": "mistral"}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"model_type": "phi3"}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 6}, {6, 7}),
        ({"model_type": "qwen2", "sliding_window": 100}, None),
        ({"model_type": "mistral", "sliding_window": 512}, None),  # all positions
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, {0, 1, 2, 4, 5, 6}),
        ({"model_type": "olmo3"}, {0, 1, 2, 4, 5, 6}),
        ({"model_type": "cohere2"}, {0, 1, 2, 4, 5, 6}),
        ({"model_type": "exaone4", "sliding_window_pattern": "G"}, None),
        (
            {"model_type": "mixtral", **MIXTURE, "layer_types": ["full_attention"] * 8},
            set(range(8)),
        ),
        ({"model_type": "olmo3", "sliding_window_pattern": 2}, {0, 1, 2, 4, 5, 6}),
        ({"model_type": "gemma3_text"}, {0, 1, 2, 3, 4, 6, 7}),
    ],
    ids=str,
)
def test_layers_with_a_window(
    fields: dict[str, Any], layers: set[int] | None, tmp_path: Path
) -> None:
    base = {**NEEDED, "num_hidden_layers": 8, "num_key_value_heads": 8, "sliding_window": 64}
    base |= {"max_position_embeddings": 512, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({**base, **fields}))
    named, pretrained = read_both(tmp_path / "config.json")[::-1]
    assert isinstance(named, ModelConfig)
    assert named == pretrained
    found = named.sliding_window
    assert (found and found.layers) == layers
    if fields["model_type"] in ("exaone4", "cohere2"):  # without a window, there is no RoPE
        assert named.nope_layers == set(range(8)) - (layers or set())
    assert named.full_layers == 8 - len(layers or ())


def test_from_name_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **NEEDED}))
    code = (
        "import sys; from parallel.config.model_config import ModelConfig; "
        f"assert ModelConfig.from_name({str(path)!r}).layers == 2; "
        "assert not {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("ids", ["</s>", [1, None], -1, True])
def test_invalid_token_ids_are_rejected(tmp_path: Path, ids: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **NEEDED, "eos_token_id": ids}))
    with pytest.raises(ConfigError, match="must be a token id or a list of them, found"):
        ModelConfig.from_name(str(path))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rope_option_equals_scaling_in_config(family: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": family, **NEEDED, "rope_theta": 1e5, "max_position_embeddings": 8192}
    fields["num_key_value_heads"] = 4
    path.write_text(json.dumps(fields))
    scaled = ModelConfig.from_name(str(path)).with_rope_scaling("yarn:4")
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    path.write_text(json.dumps({**fields, "rope_scaling": yarn, "max_position_embeddings": 32_768}))
    expected = ModelConfig.from_name(str(path))
    for config in (scaled, expected):
        config.rope.pop("type", None)
    assert scaled == expected
    assert scaled.context_limit == 32_768
    frequencies, factor = scaled.inverse_frequencies(100)
    assert torch.equal(frequencies, expected.inverse_frequencies(100)[0])
    assert factor > 1


@pytest.mark.parametrize("rope", ["yarn", "yarn:", "yarn:x", "yarn:1", "yarn:65", "linear:4", ""])
def test_unknown_rope_options_are_rejected(rope: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **NEEDED}))
    with pytest.raises(ConfigError, match=f"`rope` {rope} is not known: use yarn:FACTOR"):
        ModelConfig.from_name(str(path)).with_rope_scaling(rope)


def test_scaled_models_are_not_scaled_again(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    scaling = {"type": "linear", "factor": 2.0}
    path.write_text(json.dumps({"model_type": "llama", **NEEDED, "rope_scaling": scaling}))
    linear = ModelConfig.from_name(str(path))
    with pytest.raises(ConfigError, match="already scales its positions, by RoPE type 'linear'"):
        linear.with_rope_scaling("yarn:4")
    # the form in a GGUF file of Llama 3.1
    factors = {"rope_type": "default", "rope_theta": 1e4, "frequency_factors": [1.0, 2.0, 4.0, 8.0]}
    with pytest.raises(ConfigError, match="or by frequency factors"):
        replace(linear, rope=factors).with_rope_scaling("yarn:4")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3_moe", "decoder_sparse_step": 0, "num_experts": 4},
        {"model_type": "smollm3", "no_rope_layers": [1]},
        {"model_type": ["llama"]},
        {"model_type": ["llama"], "auto_map": {}},
        {"model_type": "llama", "rms_norm_eps": -1e-5},
        {"model_type": "llama", "rms_norm_eps": "1e-5"},
        {"model_type": "llama", "rms_norm_eps": float("nan")},
        {"model_type": "llama", "attention_bias": "no"},
        {"model_type": "llama", "tie_word_embeddings": "false"},
        {"model_type": "llama", "rope_scaling": "yarn"},
        {"model_type": "llama", "rope_parameters": ["yarn", 4.0]},
    ],
    ids=str,
)
def test_both_entry_points_reject_invalid_fields(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**NEEDED, "num_key_value_heads": 4, **fields}))
    assert all(isinstance(result, str) for result in read_both(path))
