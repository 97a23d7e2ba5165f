"""The text model in the config.json of a larger one, or of a type that is another but in name.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel.errors import ConfigError
from parallel.formats.quantisation import QUANTISATION_FIELDS

WRAPPER = "wrapper_type"  # field of the result: model type of the larger model
TIED = "tie_word_embeddings"
GROUPED_QKV = "grouped_qkv"  # field of the result: Q, K and V are stacked KV head by KV head
# Types of models for images and text whose text model is one of another type: their own files name
# it, or it is this.
_WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "internvl": None,
    "llava": None,
    "mistral3": None,
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# transformers' defaults, which the configs of text models may leave out
_SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
}
_QWEN2_VL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_id": 151_645,
    "max_window_layers": 80,
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # keys: types of text models, or of larger ones
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "vocab_size": 262_208,
    },
    "gemma4_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "vocab_size": 262_144,
    },
    "llama": {**_SIZES, "intermediate_size": 11_008},
    "mistral": {**_SIZES, "intermediate_size": 14_336},
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": {"max_position_embeddings": 128_000, "rope_theta": 5e5},
}
_SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id")
_MROPE = ("mrope_section", "mrope_interleaved")


class _Alias(NamedTuple):
    """Another type, with the names and defaults of its fields, for one that equals it."""

    model_type: str
    names: Mapping[str, str] = {}  # names of fields there, by those in the config
    defaults: Mapping[str, Any] = {}  # values of fields that a config may leave out


_ALIASES = {
    "exaone": _Alias(
        "llama",
        {
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "eos_token_id": 361,
        },
    ),
    "internlm2": _Alias(
        "llama", {"bias": "attention_bias"}, {"attention_bias": True, GROUPED_QKV: True}
    ),
    "internlm3": _Alias(
        "llama",
        {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
    ),
    "mimo": _Alias("qwen2"),  # with layers that predict further tokens, which are left out
}
OTHER_TYPES = (*_WRAPPERS, *_ALIASES)


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, as its own config.json would have them.

    Those of any other model are returned as they are. Raises ConfigError for a larger model without
    a text model, and for an InternLM3 that is no Llama.
    """
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in _ALIASES:
        return _renamed(fields, kind)
    if not isinstance(kind, str) or kind not in _WRAPPERS:
        return _with_plain_ropes(dict(fields)) if kind in _WRAPPERS.values() else dict(fields)
    inner = fields.get("text_config", fields)
    if not isinstance(inner, Mapping) or (inner is fields and _WRAPPERS[kind] is None):
        raise ConfigError(
            f"the config of this {kind} model has no text_config, which describes its language "
            "part: fetch it again."
        )
    return _inner(kind, fields, inner)


def _inner(kind: str, fields: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a text model, with what the config of the whole says of it."""
    text = {WRAPPER: kind, **inner, "model_type": _WRAPPERS[kind] or inner.get("model_type")}
    for name in _SHARED_FIELDS:
        if text.get(name) is None and fields.get(name) is not None:
            text[name] = fields[name]
    if any(map(fields.get, QUANTISATION_FIELDS)):  # as `find_quantisation`
        text |= {name: fields.get(name) for name in QUANTISATION_FIELDS}
    ties = [each[TIED] for each in (fields, inner) if TIED in each]
    if ties:  # either may say so; a head in the files decides
        text[TIED] = next((tie for tie in ties if tie is not False), False)
    text = _with_plain_ropes(text)
    if kind == "qwen3_vl":  # its text model ignores windows
        text["use_sliding_window"] = False
    for known in (text["model_type"], kind):
        if isinstance(known, str):
            text = {**_DEFAULTS.get(known, {}), **text}
    return text


def wrapper_notes(wrapper: str | None) -> list[str]:
    """Return notes for the user about a larger model's other parts, one sentence each."""
    if wrapper is None:
        return []
    return [f"Only the language part of this {wrapper} model runs: it takes text alone."]


def _with_plain_ropes(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a text model without RoPE parameters of images."""
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(name), Mapping):
            text[name] = _without_mrope(text[name])
    return text


def _without_mrope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters without those of images, whose positions have several dimensions.

    In text all dimensions are equal, and RoPE is the plain one.
    """
    plain = {name: value for name, value in rope.items() if name not in _MROPE}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain


def _renamed(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of a type that is another but in name as those of the other.

    Raises ConfigError for an InternLM3 that is no Llama.
    """
    alias = _ALIASES[kind]
    own = {alias.names.get(name, name): value for name, value in fields.items()}
    if kind == "internlm3" and bool(own.get("attention_bias")) != bool(own.get("mlp_bias")):
        raise ConfigError(
            "the model's config gives qkv_bias and bias of different values, which is not "
            "supported in internlm3."
        )
    return {**alias.defaults, **own, "model_type": alias.model_type}
