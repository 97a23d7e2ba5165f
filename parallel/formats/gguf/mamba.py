"""GGUF files of models with Mamba-2: Granite 4 (granitehybrid), and Nemotron-H (nemotron_h).

Imports neither torch nor transformers. Source: github.com/ggml-org/llama.cpp, conversion/granite.py
and nemotron.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from parallel.config_checks import FULL, LINEAR
from parallel.errors import ConfigError
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
_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
_MAMBA, _EXPERTS, _MLP, _ATTENTION = "ME-*"  # kinds of layers


def mixer(block: str) -> dict[str, str]:
    """Return the names of the parts of Mamba-2, in this block of a layer."""
    return {part: f"{block}.{name}" for part, name in _PARTS.items()}


def layer_parts(header: GgufHeader, layer: int | str, experts: Collection[str]) -> list[str]:
    """Return the parts that a layer must have by its kind.

    `experts`: those of layers of experts alone, in Nemotron-H's files.
    """
    parts = {_MAMBA: list(_PARTS), _EXPERTS: list(experts), _MLP: ["ffn_up", "ffn_down"]}
    return parts.get(_kind(header, layer), list(_PROJECTIONS))


def add_mamba(header: GgufHeader, fields: dict[str, Any]) -> None:
    """Add to a config's fields the dimensions of heads, and the kinds of layers.

    Raises ConfigError for sizes that are missing, or do not belong together.
    """
    is_granite = fields["model_type"] == "granitemoehybrid"
    names = GRANITE_FIELDS if is_granite else NEMOTRON_FIELDS
    dim = value_head_dim(header, fields, names)
    kinds = [_kind(header, layer) for layer in range(fields["num_hidden_layers"])]
    _check_lists(header, kinds)
    if not is_granite:
        fields |= {"mamba_head_dim": dim, "hybrid_override_pattern": "".join(kinds)}
        return
    fields |= {
        "mamba_d_head": dim,
        "mamba_expand": dim * fields["mamba_n_heads"] // fields["hidden_size"],
        "layer_types": [LINEAR if kind == _MAMBA else FULL for kind in kinds],
        "position_embedding_type": "rope" if fields["position_embedding_type"] else "nope",
    }
    # layers without experts have the MLP that is beside experts in others
    fields.setdefault("shared_intermediate_size", fields["intermediate_size"])


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


def _has_mlps_apart(header: GgufHeader) -> bool:
    """Return whether MLPs and experts are layers of their own."""
    return bool(header.metadata["general.architecture"] != "granitehybrid")


def _kind(header: GgufHeader, layer: int | str) -> str:
    """Return the kind of a layer by its tensors: a letter, as in Nemotron-H's config.json."""
    prefix, has_mlps_apart = f"blk.{layer}.", _has_mlps_apart(header)
    parts = [name.removeprefix(prefix) for name in header.tensors if name.startswith(prefix)]
    if any(part.startswith("ssm_") for part in parts):
        return _MAMBA
    if has_mlps_apart and any("exp" in part or "gate_inp" in part for part in parts):
        return _EXPERTS
    return _MLP if has_mlps_apart and "ffn_up.weight" in parts else _ATTENTION


def _check_lists(header: GgufHeader, kinds: Sequence[str]) -> None:
    """Raise ConfigError if lists in the metadata say that layers have other kinds."""
    expected = dict(zip(BY_LAYER, (_ATTENTION, _EXPERTS + _MLP), strict=True))
    for name in BY_LAYER if _has_mlps_apart(header) else BY_LAYER[:1]:
        key = f"{header.metadata['general.architecture']}.{name}"
        if not isinstance(numbers := header.metadata[key], list):
            continue
        for layer, (number, kind) in enumerate(zip(numbers, kinds, strict=False)):
            if bool(number) != (kind in expected[name]):
                raise ConfigError(
                    f"{header.path}: its metadata has {key} = {number} for layer {layer}, whose "
                    "tensors are of another kind: the file is broken. Fetch it again."
                )
