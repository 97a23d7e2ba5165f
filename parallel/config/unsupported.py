"""What a config.json says of parts that are not supported, in words for the person who chose it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any

# fields that mean layers of another kind
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
}
# fields of recurrent layers, of which a hybrid may have none; its list of layers says so
_HYBRID_FIELDS = ("mamba_d_state",)
_RECURRENT = ("mamba", "hybrid", "linear")  # within the names of such layers
_QUANTISED_FIELDS = ("quantization_config", "quantization", "compression_config")
_COMPRESSED = "compressed weights: use the model's 16-bit checkpoint"
_LAYER_LISTS = ("layer_types", "layers_block_type")
_ATTENDING = {"full_attention", "sliding_attention", "attention"}
_TEXT_FIELDS = ("text_config", "llm_config", "language_config")  # of wrappers, their text model's
# text models that are of another type in all but name, without and with _text behind it
_TEXT_MODELS = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
_SINKS = ("gpt_oss",)  # their configs do not name them
_CONVERSIONS = {  # of models that need code of their own, whose publishers convert them
    "chatglm": (
        "its publisher's conversions, whose names end in -hf, need no such code, but their "
        "model_type 'glm' is not supported either"
    ),
    "internlm2": (
        "tools/convert2llama.py of github.com/InternLM/InternLM makes a model of type llama of it"
    ),
    "Yi": "fetch the repository's newer revision, which is of type llama",
}


def unsupported_reason(
    given: Mapping[str, Any], supported: Iterable[str], window: str | None = None
) -> str | None:
    """Return why a model with such a config.json is not supported; None if nothing speaks against.

    Every part is named, those of a wrapper's `text_config` as well, and compressed weights last:
    they are what a user can change.

    Args:
        given: the fields of its config.json.
        supported: the model types that are supported.
        window: what a supported type's config says of sliding windows, which alone is no reason
            here: whether they act depends on RoPE as well.
    """
    kind, supported = given.get("model_type"), tuple(supported)
    known = kind in supported
    texts = (each for name in _TEXT_FIELDS if isinstance(each := given.get(name), Mapping))
    inner = {} if known else next(texts, {})
    parts = list(dict.fromkeys([*_parts(given, known), *_parts(inner, known)]))
    compressed = next(
        (part for each in (given, inner) for part in _fields(each, _QUANTISED_FIELDS)), None
    )
    if window is not None and (parts or compressed):
        parts.append(window)
    if compressed is not None:
        words = _COMPRESSED if known and not parts else _COMPRESSED.partition(":")[0]
        parts.append(f"{compressed} ({words})")
    if known:
        return (
            f"the model's config has {_listed(parts)}, which is not supported." if parts else None
        )
    reasons = [f"model_type {kind!r:.60} is not supported; supported are {', '.join(supported)}."]
    if text := _text_model(given, inner):
        support = "supported, but not within a wrapper"
        support = support if text in supported else "not supported either"
        reasons.append(f"Its text model is {text!r}, which is {support}.")
    if parts:
        reasons.append(f"It has {_listed(parts)}.")
    if "auto_map" in given:
        reasons.append(
            "It would run code that came with the model (auto_map), which is never done here"
            + (f": {_CONVERSIONS[kind]}." if kind in _CONVERSIONS else ".")
        )
    return " ".join(reasons)


def window_part(given: Mapping[str, Any], window: Any, is_used: Any, positions: Any) -> str | None:
    """Return what a config says of sliding windows that do not span all positions; None if nothing.

    Args:
        given: the config's fields.
        window: tokens of a window, if any.
        is_used: whether windows are in use.
        positions: the model's.
    """
    limit = positions if type(positions) is int else inf
    if is_used and type(window) is int and 0 < window < limit:
        return f"sliding_window = {window} (sliding-window attention)"
    if any("sliding_attention" in _kinds(given, name) for name in _LAYER_LISTS):
        return "layer_types with sliding_attention (sliding-window attention)"
    return None


def _parts(given: Mapping[str, Any], known: bool) -> Iterator[str]:
    """Yield the parts that are not supported, less windows of a known type and compression."""
    if given.get("model_type") in _SINKS:
        yield "attention sinks"
    kinds = {kind for name in _LAYER_LISTS for kind in _kinds(given, name)}
    has_recurrent = not kinds or any(word in kind for kind in kinds for word in _RECURRENT)
    names = [name for name in _FOREIGN_FIELDS if has_recurrent or name not in _HYBRID_FIELDS]
    for part in _fields(given, names):
        yield f"{part} ({_FOREIGN_FIELDS[part.partition(' ')[0]]})"
    for name in _LAYER_LISTS:
        if others := sorted(_kinds(given, name) - _ATTENDING):
            yield f"{name} with {', '.join(others)} (layers that are not attention)"
    said = (given.get("sliding_window"), given.get("use_sliding_window", True))
    window = window_part(given, *said, given.get("max_position_embeddings"))
    if window is not None and not known:
        yield window


def _text_model(given: Mapping[str, Any], inner: Mapping[str, Any]) -> str | None:
    """Return the type of a wrapper's text model, None for what is no wrapper."""
    for kind in (inner.get("model_type"), given.get("model_type")):
        if isinstance(kind, str) and (text := _TEXT_MODELS.get(kind.removesuffix("_text"))):
            return text
    kind = inner.get("model_type")
    return f"{kind:.40}" if isinstance(kind, str) else None


def _kinds(given: Mapping[str, Any], name: str) -> set[str]:
    """Return the kinds of layers that a list names."""
    kinds = given.get(name)
    return {f"{kind!s:.40}" for kind in kinds} if isinstance(kinds, list) else set()


def _fields(given: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    """Yield those of the fields that say something, with what they say."""
    for name in names:
        if given.get(name):
            yield f"{name} = {json.dumps(given[name], default=str)[:80]}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
