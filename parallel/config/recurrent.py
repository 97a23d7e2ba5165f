"""The recurrent layers of a config: gated delta nets (Qwen3-Next, Qwen3.5), or Mamba-2 (Granite 4).

Everything is read from config.json's fields; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.layout import RecurrentShape
from parallel.config_checks import (
    COUNT,
    FULL,
    LINEAR,
    MAX_LAYERS,
    OLD_KINDS,
    PREDICTORS,
    Number,
    check_number,
    per_layer_field,
    quote,
)
from parallel.errors import ConfigError
from parallel.ranks.partition import share

if TYPE_CHECKING:
    from parallel.config.families import Family

_INTERVAL = 4  # every so many layers one has full attention, by default
# Fields, and transformers' defaults: heads of keys and of values, their dimensions, and the weights
# of a channel in the convolution
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GRANITE4: dict[str, Any] = {
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
}
_NEMOTRON: dict[str, Any] = {
    "n_groups": 8,
    "mamba_num_heads": 128,
    "ssm_state_size": 128,
    "mamba_head_dim": 64,
    "conv_kernel": 4,
}


def recurrent_shape(fields: Mapping[str, Any], family: Family) -> RecurrentShape | None:
    """Return the recurrent layers, with the heads of the whole model; None if there are none.

    Raises ConfigError for invalid numbers, and for a model without full attention.
    """
    if not (family.has_delta_nets or family.has_mamba):
        return None
    kinds = _kinds(fields, family)
    if others := sorted(set(kinds) - {FULL, LINEAR}):
        raise ConfigError(
            f"the model's config gives layer_types with {quote(others[0])}; in "
            f"{fields['model_type']} they must be {LINEAR} or {FULL}."
        )
    layers = frozenset(index for index, kind in enumerate(kinds) if kind == LINEAR)
    if not layers:
        return None
    if len(layers) == len(kinds):
        raise ConfigError("the model has no layer with full attention, which is not supported.")
    mamba = _NEMOTRON if family.has_split_layers else _GRANITE4
    defaults = mamba if family.has_mamba else _DELTA_NET
    sizes = {name: fields.get(name, default) for name, default in defaults.items()}
    if "mamba_d_head" in sizes:
        sizes["mamba_d_head"] = _mamba_head_dim(fields, sizes)
    *_, kernel_field = sizes
    for name, value in sizes.items():
        check_number(name, value, COUNT if name != kernel_field else Number(low=2))
    key_heads, value_heads, key_dim, value_dim, kernel = sizes.values()
    if value_heads % key_heads:
        raise ConfigError(
            f"the model's {value_heads} value heads of linear attention do not divide into "
            f"{key_heads} key heads."
        )
    return RecurrentShape(
        layers, key_heads, value_heads, key_dim, value_dim, kernel, is_mamba=family.has_mamba
    )


def _mamba_head_dim(fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> int:
    """Return the head dimension of Mamba-2, whose heads have a width that the config gives too.

    Raises ConfigError for invalid numbers, and if they contradict each other.
    """
    heads, expansion = sizes["mamba_n_heads"], fields.get("mamba_expand", 2)
    for name, value in (("mamba_n_heads", heads), ("mamba_expand", expansion)):
        check_number(name, value, COUNT)
    width, dim = expansion * fields["hidden_size"], sizes["mamba_d_head"]
    dim = width // heads if dim == "auto" else dim
    if dim * heads != width:
        raise ConfigError(
            f"the model's config gives {heads} heads of mamba_d_head = {quote(dim)}, which have "
            f"not {width} dimensions, mamba_expand times hidden_size."
        )
    return dim


def split_heads(shape: RecurrentShape) -> int:
    """Return the heads that are split over ranks: the key heads, each with its value heads.

    Of Mamba-2 with a single one these are the value heads, and the key head is on all ranks.
    """
    return shape.value_heads if _is_replicated(shape) else shape.key_heads


def head_shares(shape: RecurrentShape, rank: int, ranks: int) -> tuple[slice, slice]:
    """Return the key heads and the value heads of a rank, given the whole model's shape."""
    own = share(split_heads(shape), rank, ranks)
    if _is_replicated(shape):
        return slice(0, 1), own
    return own, slice(own.start * shape.shared, own.stop * shape.shared)


def rank_shape(shape: RecurrentShape, rank: int, ranks: int) -> RecurrentShape:
    """Return the shape with the heads of a rank, given the whole model's."""
    keys, values = head_shares(shape, rank, ranks)
    own = keys.stop - keys.start, values.stop - values.start
    return replace(shape, key_heads=own[0], value_heads=own[1])


def _is_replicated(shape: RecurrentShape) -> bool:
    return shape.is_mamba and shape.key_heads == 1


def predicts(fields: Mapping[str, Any]) -> bool:
    """Return whether a model has one multi-token-prediction block, with the model's embedding.

    The published configs of Qwen3-Next do not say that their models have.
    """
    default = int(fields["model_type"] == "qwen3_next")
    has_embedding = fields.get("mtp_use_dedicated_embeddings")
    return fields.get(PREDICTORS, default) == 1 and not has_embedding


def unused_layers(fields: Mapping[str, Any]) -> int:
    """Return the layers that files have after the model's own, to predict further tokens."""
    count = fields.get("num_nextn_predict_layers") or 0
    check_number("num_nextn_predict_layers", count, Number(low=0, high=MAX_LAYERS))
    return int(count)


def _kinds(fields: Mapping[str, Any], family: Family) -> list[str]:
    """Return the kinds of all layers."""
    for name in ("layer_types", "layers_block_type"):
        if kinds := per_layer_field(fields, name, str):
            return [OLD_KINDS.get(kind, kind) for kind in kinds]
    if family.has_mamba:
        return [LINEAR] * fields["num_hidden_layers"]
    interval = fields.get("full_attention_interval", _INTERVAL)
    check_number("full_attention_interval", interval, COUNT)
    layers = range(fields["num_hidden_layers"])
    return [LINEAR if (layer + 1) % interval else FULL for layer in layers]
