"""GGUF files of models with gated delta nets: Qwen3-Next, Qwen3.5 and later.

Imports neither torch nor transformers. Source: github.com/ggml-org/llama.cpp, conversion/qwen.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel.config_checks import FULL, LINEAR
from parallel.errors import ConfigError
from parallel.formats.gguf.header import GgufHeader

# the convolution, a state, heads of keys and of values, and the dimensions of all the latter
SIZES = (
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
)
_CONV, _STATE, _GROUPS, _HEADS, _INNER = SIZES

NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
MIXER = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",  # has no suffix
    "ssm_dt.bias": "linear_attn.dt_bias",
}
OLD_MIXER = {"ssm_in": "linear_attn.in_proj_qkvz"}  # in place of attn_qkv and attn_gate
BETAS = {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
STACKED_BETAS = {"ssm_ba": "linear_attn.in_proj_ba"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
FIELDS = {
    _CONV: "linear_conv_kernel_dim",
    _STATE: "linear_key_head_dim",
    _GROUPS: "linear_num_key_heads",
    _HEADS: "linear_num_value_heads",
    _INNER: "linear_value_dim",
}


def add_delta_nets(header: GgufHeader, fields: dict[str, Any]) -> None:
    """Add to a config's fields the dimensions of value heads, and the kinds of layers.

    Raises ConfigError for sizes that are missing, or do not belong together.
    """
    fields["linear_value_head_dim"] = value_head_dim(header, fields, FIELDS)
    fields["layer_types"] = [
        LINEAR if has_delta_net(header, layer) else FULL
        for layer in range(fields["num_hidden_layers"])
    ]


def value_head_dim(header: GgufHeader, fields: dict[str, Any], names: Mapping[str, str]) -> int:
    """Return the dimensions of a value head, and remove those of all of them from the fields.

    `names`: the field of each of SIZES. Raises ConfigError for sizes that are missing, or do not
    belong together.
    """
    missing = [name for name in SIZES if names[name] not in fields]
    if missing:
        raise ConfigError(
            f"{header.path}: its metadata lacks {', '.join(missing)}: it does not say what the "
            "model is."
        )
    inner, heads = fields.pop(names[_INNER]), fields[names[_HEADS]]
    if inner % heads:
        raise ConfigError(
            f"{header.path}: its metadata has {_INNER} = {inner}, which does not divide into "
            f"{_HEADS} = {heads}."
        )
    return int(inner // heads)


def has_delta_net(header: GgufHeader, layer: int | str) -> bool:
    """Return whether a layer has a gated delta net, not attention."""
    return f"blk.{layer}.ssm_conv1d.weight" in header.tensors


def mixer_parts(header: GgufHeader, layer: str) -> list[str]:
    """Return the parts that a layer has of its kind: of a delta net, or of attention."""
    if not has_delta_net(header, layer):
        return ["attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"]
    parts = list(MIXER)
    if f"blk.{layer}.ssm_in.weight" in header.tensors:
        parts = [*OLD_MIXER, *(each for each in parts if not each.startswith("attn"))]
    is_stacked = f"blk.{layer}.ssm_ba.weight" in header.tensors
    return [*parts, *(STACKED_BETAS if is_stacked else BETAS)]


def delta_net_shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of delta nets and shared experts that a config implies."""
    hidden, heads = fields["hidden_size"], fields["linear_num_value_heads"]
    values = heads * fields["linear_value_head_dim"]
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_qkv.weight": (2 * keys + values, hidden),
        "attn_gate.weight": (values, hidden),
        "ssm_in.weight": (2 * keys + 2 * values, hidden),
        "ssm_conv1d.weight": (2 * keys + values, fields["linear_conv_kernel_dim"]),
        "ssm_norm.weight": (fields["linear_value_head_dim"],),
        "ssm_out.weight": (hidden, values),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_ba.weight": (2 * heads, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_beta.weight": (heads, hidden),
    }
    if (shared := fields.get("shared_expert_intermediate_size")) is not None:
        shapes |= {
            "ffn_gate_inp_shexp.weight": (hidden,),
            "ffn_gate_shexp.weight": (shared, hidden),
            "ffn_up_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
        }
    return shapes
