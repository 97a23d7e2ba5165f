"""GGUF files of models with Mamba-2: Granite 4 (granitehybrid), and Nemotron-H (nemotron_h).

Imports neither torch nor transformers. Source: github.com/ggml-org/llama.cpp, conversion/granite.py
and nemotron.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from parallel.config_checks import FULL, LINEAR
from parallel.formats.gguf.delta_nets import SIZES, value_head_dim
from parallel.formats.gguf.header import GgufHeader

# metadata with a number for each layer, 0 where the layer has no such part
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
_WIDTH = "mamba_width"
_CONV, _STATE, _GROUPS, _HEADS, _INNER = SIZES
GRANITE_FIELDS = {
    _CONV: "mamba_d_conv",
    _STATE: "mamba_d_state",
    _GROUPS: "mamba_n_groups",
    _HEADS: "mamba_n_heads",
    _INNER: _WIDTH,
    "rope.scaling.finetuned": "position_embedding_type",
}
NEMOTRON_FIELDS = {
    _CONV: "conv_kernel",
    _STATE: "ssm_state_size",
    _GROUPS: "n_groups",
    _HEADS: "mamba_num_heads",
    _INNER: _WIDTH,
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
_PARTS = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",  # has no suffix
    "ssm_d": "D",  # nor has this
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
# names of tensors that files have as matrices
VECTORS = (".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_CONVOLUTION, _EXPERTS, _MLP = "ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_up.weight"


def mixer(block: str) -> dict[str, str]:
    """Return the names of the parts of Mamba-2, in this block of a layer."""
    return {part: f"{block}.{name}" for part, name in _PARTS.items()}


def layer_parts(header: GgufHeader, layer: str, optional: Collection[str]) -> list[str]:
    """Return those of the optional parts of layers that a layer has by its kind.

    In Nemotron-H's files MLPs and experts are layers of their own.
    """
    if _has(header, layer, _CONVOLUTION):
        return list(_PARTS)
    if "ffn_up" in optional and _has(header, layer, _EXPERTS):
        return [part for part in optional if "exp" in part or part == "ffn_gate_inp"]
    if "ffn_up" in optional and _has(header, layer, _MLP):
        return ["ffn_up", "ffn_down"]
    return list(_ATTENTION)


def add_mamba(header: GgufHeader, fields: dict[str, Any]) -> None:
    """Add to a config's fields the dimensions of heads, and the kinds of layers.

    Raises ConfigError for sizes that are missing, or do not belong together.
    """
    is_granite = fields["model_type"] == "granitemoehybrid"
    names = GRANITE_FIELDS if is_granite else NEMOTRON_FIELDS
    dim = value_head_dim(header, fields, names)
    if is_granite:
        _add_granite(header, fields, dim)
        return
    fields["mamba_head_dim"] = dim
    layers = range(fields["num_hidden_layers"])
    fields["hybrid_override_pattern"] = "".join(_letter(header, str(layer)) for layer in layers)


def mamba_shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of Mamba-2 and of shared experts that a config implies."""
    is_granite = fields["model_type"] == "granitemoehybrid"
    names = GRANITE_FIELDS if is_granite else NEMOTRON_FIELDS
    kernel, state, groups, heads = (fields[names[name]] for name in SIZES[:-1])
    hidden = fields["hidden_size"]
    width = heads * fields["mamba_d_head" if is_granite else "mamba_head_dim"]
    channels = width + 2 * groups * state
    shapes: dict[str, tuple[int, ...]] = {
        "ssm_in.weight": (width + channels + heads, hidden),
        "ssm_conv1d.weight": (channels, kernel),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm.weight": (groups, width // groups),
        "ssm_out.weight": (hidden, width),
    }
    shared = "shared_intermediate_size" if is_granite else "moe_shared_expert_intermediate_size"
    if (size := fields.get(shared)) is not None:
        shapes |= dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), (size, hidden))
        shapes["ffn_down_shexp.weight"] = hidden, size
    return shapes


def _add_granite(header: GgufHeader, fields: dict[str, Any], dim: int) -> None:
    width = dim * fields["mamba_n_heads"]
    layers = range(fields["num_hidden_layers"])
    kinds = [_has(header, str(layer), _CONVOLUTION) for layer in layers]
    fields |= {
        "mamba_d_head": dim,
        "mamba_expand": width // fields["hidden_size"],
        "layer_types": [LINEAR if is_recurrent else FULL for is_recurrent in kinds],
        "position_embedding_type": "rope" if fields["position_embedding_type"] else "nope",
    }
    # layers without experts have the MLP that is beside experts in others
    fields.setdefault("shared_intermediate_size", fields["intermediate_size"])


def _letter(header: GgufHeader, layer: str) -> str:
    """Return the kind of a layer of Nemotron-H, as its config.json has it."""
    parts = {_CONVOLUTION: "M", _EXPERTS: "E", _MLP: "-"}
    return next((letter for part, letter in parts.items() if _has(header, layer, part)), "*")


def _has(header: GgufHeader, layer: str, part: str) -> bool:
    return f"blk.{layer}.{part}" in header.tensors
