"""What GGUF files say of multi-head latent attention: those of architecture deepseek2.

Newer ones have the projections of keys and of values apart, that of keys transposed, and give the
dimensions of what is kept of a token where others give those of heads. Source:
github.com/ggml-org/llama.cpp, conversion/deepseek.py. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel.errors import ConfigError
from parallel.formats.gguf.header import GgufHeader

_KEYS, _VALUES, _ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"
_HEAD_KEYS, _HEAD_VALUES = f"{_KEYS}_mla", f"{_VALUES}_mla"
_RANK, _SIGMOID = "attention.kv_lora_rank", 2
FIELDS = {  # metadata key without the architecture: field of a config.json
    _RANK: "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    _HEAD_KEYS: "qk_head_dim",
    _HEAD_VALUES: "v_head_dim",
    "expert_gating_func": "gating",
}
# llama.cpp's defaults
CONSTANTS = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
}
OPTIONAL = ("attn_q", "attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_b", "attn_k_b", "attn_v_b")
CORRECTION = "exp_probs_b.bias"


def add_latents(header: GgufHeader, values: Mapping[str, Any], fields: dict[str, Any]) -> int:
    """Add to a config's fields the dimensions of heads; return how many of them rotate.

    `values` are the architecture's metadata. Raises ConfigError for sizes that are missing, or do
    not belong together.
    """
    missing = [name for name in (_KEYS, _VALUES, _ROTATED, _RANK) if name not in values]
    if missing:
        raise ConfigError(
            f"{header.path}: its metadata lacks {', '.join(missing)}: it does not say what the "
            "model is."
        )
    keys, rotated = values.get(_HEAD_KEYS, values[_KEYS]), int(values[_ROTATED])
    if rotated >= keys:
        raise ConfigError(
            f"{header.path}: its metadata has {_ROTATED} = {rotated} of {keys} dimensions of a "
            "head, all of which would rotate; that is not supported."
        )
    is_corrected = any(name.endswith(CORRECTION) for name in header.tensors)
    others = fields["n_group"] > 1, fields["norm_topk_prob"], fields.get("gating") == _SIGMOID
    if not is_corrected and any(others):
        raise ConfigError(
            f"{header.path}: experts in groups, with weights that sum to 1, or by sigmoids are not "
            f"supported without {CORRECTION}."
        )
    for name in ("head_dim", "qk_head_dim", "gating"):
        fields.pop(name, None)
    fields |= {
        "model_type": "deepseek_v3" if is_corrected else "deepseek_v2",
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": fields.get("q_lora_rank") or None,
        "routed_scaling_factor": fields["routed_scaling_factor"] or 1.0,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values.get(_HEAD_VALUES, values[_VALUES]),
    }
    return rotated


def needed_parts(header: GgufHeader, layer: str) -> list[str]:
    """Return the parts that a layer has in one of several forms."""
    has_latent = f"blk.{layer}.attn_q_a.weight" in header.tensors
    queries = ["attn_q_a", "attn_q_a_norm", "attn_q_b"] if has_latent else ["attn_q"]
    is_split = f"blk.{layer}.attn_k_b.weight" in header.tensors
    return [*queries, *(["attn_k_b", "attn_v_b"] if is_split else ["attn_kv_b"])]


def scale_attention(rope: dict[str, Any]) -> None:
    """Set the factors of YaRN on attention; files have a tenth of what a config.json has."""
    if scale := rope.get("mscale_all_dim"):
        rope |= {"mscale_all_dim": 10 * scale, "mscale": 10 * scale}


def latent_shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of latent attention that a config implies."""
    hidden, heads, rank = (
        fields[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    rotated, plain, values = (
        fields[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (heads * (plain + rotated), hidden),
        "attn_kv_a_mqa": (rank + rotated, hidden),
        "attn_kv_a_norm": (rank,),
        "attn_kv_b": (heads * (plain + values), rank),
        "attn_k_b": (heads, rank, plain),
        "attn_v_b": (heads, values, rank),
        "attn_output": (hidden, heads * values),
    }
    if (queries := fields["q_lora_rank"]) is not None:
        shapes["attn_q_a"] = (queries, hidden)
        shapes["attn_q_b"] = (heads * (plain + rotated), queries)
    return {f"{name}.weight": shape for name, shape in shapes.items()}
