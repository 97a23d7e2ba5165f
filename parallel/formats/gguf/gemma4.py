"""What the metadata of a Gemma 4 says of its kinds of layers.

Source: github.com/ggml-org/llama.cpp, conversion/gemma.py. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.config_checks import COUNT, FULL, SLIDING, quote
from parallel.errors import ConfigError
from parallel.formats.gguf.header import GgufHeader
from parallel.formats.gguf.tensors import read_floats

KV_HEADS = "attention.head_count_kv"  # a number, or one for each layer
_PATTERN = "attention.sliding_window_pattern"
_FACTORS = "rope_freqs.weight"
_NO_ROTATION = 1e20  # at least: a divisor of frequencies that leaves nothing of them


def add_gemma4(header: GgufHeader, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Add to a config's fields the heads and the RoPE of each kind of layer.

    `values` are the architecture's metadata. Raises ConfigError for kinds that are not alike.
    """
    pattern = values.get(_PATTERN)
    if not isinstance(pattern, str):
        raise ConfigError(
            f"{header.path}: its metadata has gemma4.{_PATTERN} = {quote(pattern)}; it must say "
            "of each layer whether it has a window."
        )
    full_dim, dim = fields["head_dim"], values.get("attention.key_length_swa", fields["head_dim"])
    full_dim = values.get("attention.key_length", full_dim)
    sizes = {
        "attention.value_length": full_dim,
        "rope.dimension_count": full_dim,
        "attention.value_length_swa": dim,
        "rope.dimension_count_swa": dim,
    }
    for name, size in sizes.items():
        if values.get(name, size) != size:
            raise ConfigError(
                f"{header.path}: its metadata has gemma4.{name} = {quote(values[name])} for heads "
                f"of {size} dimensions, which is not supported."
            )
    heads = values.get(KV_HEADS, fields["num_attention_heads"])
    by_layer = heads if isinstance(heads, list) else [heads] * len(pattern)
    full_layers = [index for index, kind in enumerate(pattern) if kind == "G"]
    full_heads = _one(header, [by_layer[index] for index in full_layers])
    own = [count for count, kind in zip(by_layer, pattern, strict=True) if kind == "L"]
    overrides = {"head_dim": full_dim, "num_key_value_heads": full_heads}
    fields |= {
        "head_dim": dim,
        "num_key_value_heads": _one(header, own) if own else full_heads,
        "per_layer_config": {str(layer): overrides for layer in full_layers},
        "attention_k_eq_v": _shares_values(header, full_layers),
        "rope_parameters": _ropes(header, values, fields, full_dim),
    }


def _one(header: GgufHeader, counts: Sequence[Any]) -> int:
    """Return the number of KV heads of layers of one kind. Raises ConfigError if they differ."""
    first = counts[0] if counts else None
    if not COUNT.allows(first) or any(count != first for count in counts):
        raise ConfigError(
            f"{header.path}: its metadata has gemma4.{KV_HEADS} of {quote(counts)} in layers of "
            f"one kind; it must be {COUNT}, the same for all of them."
        )
    assert isinstance(first, int)
    return first


def _shares_values(header: GgufHeader, full_layers: Sequence[int]) -> bool:
    """Return whether layers with full attention have no projection of values.

    Raises ConfigError if some have one, or if others lack it.
    """
    lacking = {
        int(name.split(".")[1])
        for name in header.tensors
        if name.endswith(".attn_k.weight")
        and name.replace("attn_k", "attn_v") not in header.tensors
    }
    if lacking and lacking != set(full_layers):
        raise ConfigError(
            f"{header.path}: layers {quote(sorted(lacking))} have no attn_v, which is supported "
            "in those with full attention alone, and in all of them."
        )
    return bool(lacking)


def _ropes(
    header: GgufHeader, values: Mapping[str, Any], fields: dict[str, Any], dim: int
) -> dict[str, Any]:
    """Return the RoPE of each kind of layer; of those with full attention, a part may rotate."""
    part = 1.0
    if (tensor := header.tensors.get(_FACTORS)) is not None:
        factors = read_floats(header, tensor, dim // 2, maximum=float("inf"))
        rotated = sum(factor == 1.0 for factor in factors)
        part = 2 * rotated / dim
        is_exact = int(part * dim // 2) == rotated  # as it will be read
        if not is_exact or any(factor < _NO_ROTATION for factor in factors[rotated:]):
            raise ConfigError(
                f"{header.path}: its {_FACTORS} has other divisors than 1, followed by some of at "
                f"least {_NO_ROTATION:g}, which is not supported."
            )
    full = {"rope_type": "proportional", "partial_rotary_factor": part}
    full["rope_theta"] = values.get("rope.freq_base", 1e6)
    local = fields.pop("rope_local_base_freq", 10_000.0)
    fields.pop("rope_theta", None)
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}
