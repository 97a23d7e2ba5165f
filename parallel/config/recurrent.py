"""The recurrent layers of a config: gated delta nets, of which Qwen3-Next and Qwen3.5 have most.

Everything is read from config.json's fields; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload.layout import RecurrentShape
from parallel.config_checks import (
    COUNT,
    FULL,
    LINEAR,
    MAX_LAYERS,
    PREDICTORS,
    Number,
    check_number,
    per_layer_field,
    quote,
)
from parallel.errors import ConfigError

if TYPE_CHECKING:
    from parallel.config.families import Family

_INTERVAL = 4  # every so many layers one has full attention, by default
_KERNEL = "linear_conv_kernel_dim"
_SIZES = {  # fields, and transformers' defaults
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    _KERNEL: 4,
}


def recurrent_shape(fields: Mapping[str, Any], family: Family) -> RecurrentShape | None:
    """Return the recurrent layers, with the heads of the whole model; None if there are none.

    Raises ConfigError for invalid numbers, and for a model without full attention.
    """
    if not family.has_delta_nets:
        return None
    kinds = _kinds(fields)
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
    sizes = {name: fields.get(name, default) for name, default in _SIZES.items()}
    for name, value in sizes.items():
        check_number(name, value, COUNT if name != _KERNEL else Number(low=2))
    key_heads, value_heads, key_dim, value_dim, kernel = sizes.values()
    if value_heads % key_heads:
        raise ConfigError(
            f"the model's {value_heads} value heads of linear attention do not divide into "
            f"{key_heads} key heads."
        )
    return RecurrentShape(layers, key_heads, value_heads, key_dim, value_dim, kernel)


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


def _kinds(fields: Mapping[str, Any]) -> list[str]:
    """Return the kinds of all layers."""
    if kinds := per_layer_field(fields, "layer_types", str):
        return kinds
    interval = fields.get("full_attention_interval", _INTERVAL)
    check_number("full_attention_interval", interval, COUNT)
    layers = range(fields["num_hidden_layers"])
    return [LINEAR if (layer + 1) % interval else FULL for layer in layers]
