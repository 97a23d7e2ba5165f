"""The KV heads of layers with full attention, where they differ from those with a window (Gemma 4).

Everything is read from config.json's fields; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from offload.layout import SlidingWindow
from parallel.config_checks import COUNT, bool_field, check_number, quote
from parallel.errors import ConfigError

_GLOBAL_HEAD_DIM = 512  # transformers' default
_OVERRIDES = {"head_dim", "num_key_value_heads"}


def shares_keys(fields: Mapping[str, Any]) -> bool:
    """Return whether keys and values of layers with full attention are one projection."""
    return bool_field(fields, "attention_k_eq_v", False)


def full_attention_heads(
    fields: Mapping[str, Any], kv_heads: int, head_dim: int, windows: SlidingWindow | None
) -> tuple[int, int]:
    """Return the KV heads of layers with full attention, and their dimensions.

    `kv_heads` and `head_dim` are those of layers with a window. Raises ConfigError for layers that
    differ otherwise.
    """
    by_layer = fields.get("per_layer_config")
    own: dict[str, Any] = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if by_layer is None:
        heads = fields.get("num_global_key_value_heads") if shares_keys(fields) else None
        own["num_key_value_heads"] = kv_heads if heads is None else heads
        own["head_dim"] = fields.get("global_head_dim", _GLOBAL_HEAD_DIM)
    elif by_layer != {}:
        layers = set(range(fields["num_hidden_layers"]))
        own |= _shared_overrides(by_layer, layers - (windows.layers if windows else set()))
    for name, value in own.items():
        check_number(f"{name} of full attention", value, COUNT)
    return own["num_key_value_heads"], own["head_dim"]


def _shared_overrides(by_layer: Any, layers: Collection[int]) -> dict[str, Any]:
    """Return what a per_layer_config says of all layers with full attention, and of no other."""
    entries = by_layer.items() if isinstance(by_layer, Mapping) else ()
    overrides = {  # numbers may begin with zeros
        int(layer) if str(layer).isdecimal() else layer: dict(each)
        for layer, each in entries
        if isinstance(each, Mapping)
    }
    own = next(iter(overrides.values()), {})
    is_uniform = all(each == own for each in overrides.values())
    if set(overrides) != set(layers) or not is_uniform or not own.keys() <= _OVERRIDES:
        raise ConfigError(
            f"the model's config gives per_layer_config = {quote(by_layer)}; it must give heads "
            "of the same number and size for all layers of full_attention, and for no others."
        )
    return own
