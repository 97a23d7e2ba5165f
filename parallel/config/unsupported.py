"""Error messages for unsupported features that a config.json indicates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any

from parallel.config.text_model import OTHER_TYPES, WRAPPER
from parallel.config_checks import FULL, LINEAR, SLIDING, quote
from parallel.formats.quantisation import (
    READABLE,
    Quantisation,
    UnsupportedQuantisation,
    quantisation_fields,
)

# fields that indicate unsupported kinds of layers
_FOREIGN_FIELDS = {
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "kv_lora_rank": "multi-latent attention",
    "add_full_attention_sink_bias": "attention sinks",
    "add_swa_attention_sink_bias": "attention sinks",
    "mamba_d_state": "recurrent layers",
    "ssm_state_size": "recurrent layers",
    "state_size": "recurrent layers",
    "linear_num_key_heads": "linear attention",
    "conv_L_cache": "convolutional layers",
    "use_bidirectional_attention": "attention to later tokens",
    "use_cla": "layers that share keys and values",
    "use_qk_norm": "norms of queries and keys that differ by head",
    "use_bias": "biases of all projections",
}
# fields of recurrent layers, which a hybrid need not have: its list of layers decides
_HYBRID_FIELDS = ("mamba_d_state",)
_MAMBA = {"granitemoehybrid": "mamba_d_state", "nemotron_h": "ssm_state_size"}
# fields of such models, their values in published ones, and what others would mean
_MAMBA_FIELDS: dict[str, tuple[Any, str]] = {
    "mamba_conv_bias": (True, "convolutions without biases"),
    "use_conv_bias": (True, "convolutions without biases"),
    "mamba_proj_bias": (False, "biases of projections"),
    "moe_latent_size": (None, "experts between projections"),
    "mamba_hidden_act": ("silu", "activations other than SiLU"),
}
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with linear attention
# those of the above that are supported in some types
_SUPPORTED_FIELDS: dict[Any, tuple[str, ...]] = {
    "gemma4_text": ("final_logit_softcapping", "use_bidirectional_attention"),
    "glm4_moe": ("use_qk_norm",),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"), ("kv_lora_rank",)),
    **dict.fromkeys(_DELTA_NETS, ("linear_num_key_heads",)),
    "hunyuan_v1_dense": ("use_qk_norm",),
    **{kind: (field,) for kind, field in _MAMBA.items()},
}
_RECURRENT = ("mamba", "hybrid", "linear")  # parts of the names of recurrent layers
_LAYER_LISTS = ("layer_types", "layers_block_type")
_ATTENTION_TYPES = {FULL, SLIDING, "attention"}
_SAVED_INF = {"__float__": "Infinity"}  # as transformers writes it
# config of the text model within a wrapper
_TEXT_FIELDS = ("text_config", "llm_config", "language_config")
_CONVERSIONS = {  # hints on models that need custom code but can be converted
    "chatglm": "its publisher's conversions, whose names end in -hf, need no such code",
    "Yi": "fetch the repository's newer revision, which is of type llama",
}


def unsupported_reason(fields: Mapping[str, Any], supported: Iterable[str]) -> str | None:
    """Return why a model with this config.json is not supported; None if no reason is found.

    All unsupported features are named, including those of a wrapper's `text_config`; quantised
    weights come last, because the user can change them. `supported`: the supported model types.
    """
    kind, supported = fields.get("model_type"), tuple(supported)
    known = kind in supported
    wrapped = (nested for name in _TEXT_FIELDS if isinstance(nested := fields.get(name), Mapping))
    inner = {} if known else next(wrapped, {})
    parts = list(dict.fromkeys([*_parts(fields, known), *_parts(inner, known)]))
    quantised = _quantised_part(fields) or _quantised_part(inner)
    if quantised is not None:
        parts.append(quantised + (f" (use {READABLE})" if known and not parts else ""))
    if known:
        return f"the model's config has {_join(parts)}, which is not supported." if parts else None
    whole = f"of this {fields[WRAPPER]} model's text " if WRAPPER in fields else ""
    names = ", ".join((*supported, *OTHER_TYPES))
    reasons = [f"model_type {kind!r:.60} {whole}is not supported; supported are {names}."]
    if isinstance(text_model := inner.get("model_type"), str):
        support = "supported, but not within this wrapper"
        support = support if text_model in supported else "not supported either"
        reasons.append(f"Its text model is {text_model!r:.60}, which is {support}.")
    if parts:
        reasons.append(f"It has {_join(parts)}.")
    if "auto_map" in fields:
        reasons.append(
            "It would run code that came with the model (auto_map), which is never done"
            + (f": {_CONVERSIONS[kind]}." if kind in _CONVERSIONS else ".")
        )
    return " ".join(reasons)


def _window_part(fields: Mapping[str, Any]) -> str | None:
    """Return a description of sliding windows shorter than the positions; None without any."""
    window, positions = fields.get("sliding_window"), fields.get("max_position_embeddings")
    limit = positions if type(positions) is int else inf
    is_used = fields.get("use_sliding_window", True)
    if is_used and type(window) is int and 0 < window < limit:
        return f"sliding_window = {window} (sliding-window attention)"
    if any(SLIDING in _kinds(fields, name) for name in _LAYER_LISTS):
        return f"layer_types with {SLIDING} (sliding-window attention)"
    return None


def _parts(fields: Mapping[str, Any], known: bool) -> Iterator[str]:
    """Yield unsupported features, without quantisation and the windows of a known type."""
    kinds = {kind for name in _LAYER_LISTS for kind in _kinds(fields, name)}
    has_recurrent = not kinds or any(word in kind for kind in kinds for word in _RECURRENT)
    supported = _SUPPORTED_FIELDS.get(fields.get("model_type"), ())
    supported += () if has_recurrent else _HYBRID_FIELDS
    names = [name for name in _FOREIGN_FIELDS if name not in supported]
    if fields.get("model_type") == "gemma4_text":
        yield from _gemma4_parts(fields)
    is_mamba = fields.get("model_type") in _MAMBA
    if is_mamba:
        yield from _mamba_parts(fields)
    attention_types = set(_ATTENTION_TYPES)
    if is_mamba or fields.get("model_type") in _DELTA_NETS:
        attention_types |= {LINEAR, "mamba", "mlp", "moe"} if is_mamba else {LINEAR}
    for part in _present_fields(fields, names):
        yield f"{part} ({_FOREIGN_FIELDS[part.partition(' ')[0]]})"
    for name in _LAYER_LISTS:
        if others := sorted(_kinds(fields, name) - attention_types):
            yield f"{name} with {', '.join(others)} (layers that are not attention)"
    if not known and (window := _window_part(fields)) is not None:
        yield window


def _gemma4_parts(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unsupported features of a Gemma 4, whose fields have other models' names."""
    if size := fields.get("hidden_size_per_layer_input", 256):
        yield f"hidden_size_per_layer_input = {quote(size)} (embeddings of each layer)"
    if shared := fields.get("num_kv_shared_layers"):
        yield f"num_kv_shared_layers = {quote(shared)} (layers without keys and values)"
    if (later := fields.get("use_bidirectional_attention")) not in (None, "vision"):
        yield f"use_bidirectional_attention = {quote(later)} (attention to later tokens)"


def _mamba_parts(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unsupported features of Mamba-2, which published models do not have."""
    if fields["model_type"] == "nemotron_h" and fields.get("mlp_bias"):
        yield "mlp_bias = true (biases of MLPs)"
    for name, (usual, meaning) in _MAMBA_FIELDS.items():
        if (value := fields.get(name, usual)) != usual and (value or usual):
            yield f"{name} = {json.dumps(value, default=str)[:80]} ({meaning})"
    # transformers limits step sizes in prompts, but not in single tokens; those of Nemotron-H by
    # another field, which is the training's
    limit = fields.get("time_step_limit") or [0, inf]
    is_pair = isinstance(limit, list | tuple) and len(limit) == 2
    is_none = is_pair and not limit[0] and limit[1] in (inf, _SAVED_INF)
    if not is_none and fields["model_type"] != "nemotron_h":
        yield f"time_step_limit = {quote(limit)} (limits of step sizes)"


def _quantised_part(fields: Mapping[str, Any]) -> str | None:
    """Return how weights are quantised, if that is not supported."""
    try:
        config = quantisation_fields(fields)
        if config:
            method = Quantisation.parse(config).method
            if method == "mxfp4" and fields.get("model_type") != "gpt_oss":
                return "weights quantised by MXFP4"
    except UnsupportedQuantisation as error:
        return f"weights quantised by {error}"
    return None


def _kinds(fields: Mapping[str, Any], name: str) -> set[str]:
    """Return the kinds of layers in a field that lists them."""
    kinds = fields.get(name)
    return {f"{kind!s:.40}" for kind in kinds} if isinstance(kinds, list) else set()


def _present_fields(fields: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    """Yield the fields that are present and not empty, with their values."""
    for name in names:
        if fields.get(name):
            yield f"{name} = {json.dumps(fields[name], default=str)[:80]}"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
