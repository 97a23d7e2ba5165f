"""The RoPE parameters of a config, and the frequencies computed from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel.config.families import PROPORTIONAL, Family
from parallel.config.layer_heads import LatentShape
from parallel.config_checks import (
    FULL,
    SCALE,
    SLIDING,
    Number,
    bool_field,
    check_number,
    is_positive,
    quote,
)
from parallel.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROPE_FACTOR = 64  # largest position scaling that `rope` accepts
ALPHA = "alpha"  # parameter of Hunyuan's RoPE
_THETA_RANGE = Number(low=2, high=1e15, whole=False)
_FACTOR_RANGE = Number(low=1, high=1e6, whole=False)
_POSITIONS_RANGE = Number(low=2)
_REQUIRED: dict[str, dict[str, Number]] = {  # required parameters, by RoPE type
    "default": {},
    PROPORTIONAL: {},
    "linear": {"factor": _FACTOR_RANGE},
    "dynamic": {"factor": _FACTOR_RANGE},
    "yarn": {"factor": _FACTOR_RANGE, "original_max_position_embeddings": _POSITIONS_RANGE},
    "llama3": {
        "factor": _FACTOR_RANGE,
        "original_max_position_embeddings": _POSITIONS_RANGE,
        "low_freq_factor": SCALE,
        "high_freq_factor": SCALE,
    },
    "longrope": {"original_max_position_embeddings": _POSITIONS_RANGE},
}
_OPTIONAL = {
    "factor": _FACTOR_RANGE,
    "attention_factor": SCALE,
    ALPHA: SCALE,
    "mscale": Number(low=0, high=1e6, whole=False),
    "mscale_all_dim": Number(low=0, high=1e6, whole=False),
    "beta_fast": SCALE,
    "beta_slow": SCALE,
}
_PART = "partial_rotary_factor"
_PART_RANGE = Number(low=0, high=1, whole=False)
_EXTENDED = ("yarn", "llama3", "longrope")  # types with original_max_position_embeddings
_QUERY_SCALE = "llama_4_scaling_beta"
_MINISTRAL3 = {  # transformers' default
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _QUERY_SCALE: 0.1,
}
_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,  # the bounds of the dimensions that are interpolated are not whole
}
_APERTUS = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# transformers' defaults, by model type, for a config without RoPE parameters
_DEFAULTS: dict[Any, dict[str, Any]] = {"apertus": _APERTUS, "gpt_oss": _GPT_OSS}
_GEMMA4 = {  # likewise, by kind of layer
    FULL: {"rope_type": PROPORTIONAL, _PART: 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_LONG_FACTORS = ("short_factor", "long_factor")


class QueryScaling(NamedTuple):
    """A factor on the queries of each position: 1 + beta log(1 + floor(position / positions)).

    Also called attention temperature. Ministral 3 has it from Llama 4. Source: transformers,
    modeling_ministral3.py.
    """

    beta: float
    positions: int


def rope_factor(rope: str) -> float:
    """Return the factor of `yarn:FACTOR`. Raises ConfigError for anything else."""
    kind, _, number = rope.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if kind != "yarn" or not 1 < factor <= MAX_ROPE_FACTOR:
        raise ConfigError(
            f"`rope` {rope} is not known: use yarn:FACTOR, such as yarn:4, with a factor above 1 "
            f"and up to {MAX_ROPE_FACTOR}."
        )
    return factor


def read_rope(
    fields: Mapping[str, Any], family: Family, head_dim: int
) -> tuple[dict[str, Any], int]:
    """Return rope_parameters in transformers' current form, and the number of rotary dimensions.

    Older forms of the config are read as well. The rotary dimensions are the first ones of a head.
    Of a family with two kinds of layers, it is the RoPE of those without a window. Raises
    ConfigError for an unsupported RoPE type and for invalid numbers.
    """
    rope = rope_object(fields) or _default_rope(fields, family)
    if family.windowed_theta is not None:
        # Gemma 4 is newer than this field
        scaling = {} if family.is_gemma4 else dict(fields.get("rope_scaling") or {})
        if {FULL, SLIDING} & scaling.keys():
            raise ConfigError(
                f"the model's config gives rope_scaling = {quote(scaling)}; it must be that of "
                f"{FULL} alone."
            )
        rope = {**_of_kind(fields, FULL, family), **scaling}
    unused = {"max_position_embeddings": family.has_query_scaling, ALPHA: not family.has_rope_alpha}
    rope = {name: each for name, each in rope.items() if not unused.get(name)}
    rope["rope_type"] = _rope_type(rope)
    rope.setdefault("rope_theta", fields.get("rope_theta", family.rope_theta))
    if rope["rope_type"] in family.rope_aliases:
        rope["rope_type"] = "longrope"
    kind = rope["rope_type"]
    if kind not in family.rope_types or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"RoPE type {quote(kind)} is not supported; supported are "
            f"{', '.join(family.rope_types)}, one for all layers."
        )
    rotary_dim = _rotary_dim(head_dim, _rotary_part(rope, fields, family), family)
    if kind in _EXTENDED:
        positions = fields.get("max_position_embeddings", family.max_positions)
        # a field beside rope_parameters takes precedence over the one within
        original = fields.get("original_max_position_embeddings", family.original_positions)
        if original is not None and family.windowed_theta is None:
            rope["original_max_position_embeddings"] = original
        rope.setdefault("original_max_position_embeddings", positions)
    _check_numbers(rope, kind)
    if kind == "longrope":
        _check_long_factors(rope, rotary_dim // 2)
    if kind == "dynamic" and rotary_dim < 4:
        raise ConfigError(f"RoPE type 'dynamic' needs more than {rotary_dim} rotary dimensions.")
    return rope, rotary_dim


def _default_rope(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a family's default of rope_parameters, for a config that gives none."""
    if family.has_query_scaling:
        return dict(_MINISTRAL3)
    is_absent = fields.get("rope_parameters") is None  # an empty one is the default type
    return dict(_DEFAULTS.get(fields["model_type"], {})) if is_absent else {}


def latent_multiplier(shape: LatentShape, rope: Mapping[str, Any]) -> float:
    """Return what queries of latent attention are multiplied by, beside the head dimension's scale.

    YaRN's factor on attention is squared there (transformers, modeling_deepseek_v3.py).
    """
    multiplier = (shape.head_dim / shape.query_dim) ** 0.5
    scale = rope.get("mscale_all_dim") or 0
    if rope["rope_type"] == "default" or not scale or rope.get("factor", 1) <= 1:
        return multiplier
    return float(multiplier * (0.1 * scale * math.log(rope["factor"]) + 1) ** 2)


def read_windowed_rope(
    fields: Mapping[str, Any], family: Family, head_dim: int
) -> dict[str, Any] | None:
    """Return the RoPE of layers with a window, as `read_rope`; None if it is that of the others.

    Raises ConfigError.
    """
    theta = family.windowed_theta
    if theta is None:
        return None
    rope = _of_kind(fields, SLIDING, family)
    local = fields.get("rope_local_base_freq", theta) if family.is_gemma else theta
    rope.setdefault("rope_theta", local)
    if _rope_type(rope) in ("dynamic", "longrope"):
        raise ConfigError(
            f"RoPE type {quote(_rope_type(rope))}, which depends on the length of a sequence, is "
            f"not supported in layers of {SLIDING}."
        )
    ignored = "rope_scaling", "original_max_position_embeddings"
    own = {name: each for name, each in fields.items() if name not in ignored}
    plain = replace(family, windowed_theta=None)
    return read_rope({**own, "rope_parameters": rope}, plain, head_dim)[0]


def _of_kind(fields: Mapping[str, Any], kind: str, family: Family) -> dict[str, Any]:
    """Return the rope_parameters of one kind of layers; empty if a config gives none.

    Raises ConfigError if they are not objects by kind.
    """
    rope_object(fields)  # checks the type
    rope = fields.get("rope_parameters") or {}
    if rope and not {FULL, SLIDING} & rope.keys():
        raise ConfigError(
            f"the model's config gives rope_parameters = {quote(rope)}; it must have those of "
            f"{FULL} and of {SLIDING}."
        )
    own = rope.get(kind)
    if family.is_gemma4 and fields.get("rope_parameters") is None:
        own = _GEMMA4[kind]
    if not isinstance(own, Mapping | None):
        raise ConfigError(
            f"the model's config gives rope_parameters of {kind} = {quote(own)}; they must be an "
            "object."
        )
    return dict(own or {})


def inverse_frequencies(
    rope: Mapping[str, Any], rotary_dim: int, max_positions: int, tokens: int
) -> tuple[Tensor, float]:
    """Return the inverse frequencies (rotary_dim / 2,) float32, and the factor on cos and sin.

    transformers computes those that are scaled. `tokens` matters only to types that depend on a
    sequence's length; with Hunyuan's alpha, dynamic RoPE is the default one of a larger base. A
    GGUF file may give frequency factors, by which they are divided, instead of a RoPE type.
    """
    own = {name: value for name, value in rope.items() if name != _QUERY_SCALE}
    depends_on_tokens = own["rope_type"] in ("dynamic", "longrope")
    return _frequencies(
        json.dumps(own), rotary_dim, max_positions, tokens if depends_on_tokens else 1
    )


@lru_cache(maxsize=16)  # requests ask for the same ones; a LlamaConfig takes half a ms
def _frequencies(
    parameters: str, rotary_dim: int, max_positions: int, tokens: int
) -> tuple[Tensor, float]:
    """Return `inverse_frequencies`, given the parameters in JSON. They must not be changed."""
    import torch

    rope = json.loads(parameters)
    factors = rope.pop("frequency_factors", None)
    if (alpha := rope.pop(ALPHA, None)) and rope["rope_type"] == "dynamic":
        theta = rope["rope_theta"] * alpha ** (rotary_dim / (rotary_dim - 2))
        rope |= {"rope_type": "default", "rope_theta": theta}
    if rope["rope_type"] == "default":
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        inverse, scale = 1.0 / rope["rope_theta"] ** steps, 1.0
    else:
        from transformers import LlamaConfig  # takes half a second
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        hf = LlamaConfig(
            hidden_size=rotary_dim,
            num_attention_heads=1,
            head_dim=rotary_dim,
            max_position_embeddings=max_positions,
            rope_parameters=rope,
        )
        compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        inverse, scale = compute(hf, torch.device("cpu"), seq_len=tokens)
    return inverse if factors is None else inverse / torch.tensor(factors), scale


def query_scaling(rope: Mapping[str, Any]) -> QueryScaling | None:
    """Return how the queries of Ministral 3 are scaled, from its RoPE parameters.

    Raises ConfigError for an invalid number.
    """
    beta = rope.get(_QUERY_SCALE)
    if beta is None:
        return None
    check_number(f"RoPE's {_QUERY_SCALE}", beta, Number(low=0, high=1e6, whole=False))
    positions: Any = rope.get("original_max_position_embeddings")
    check_number("original_max_position_embeddings", positions, _POSITIONS_RANGE)
    return QueryScaling(float(beta), int(positions))


def with_known_rope(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a modifiable copy of a config.json's fields, with current names of RoPE's type.

    transformers renames LongRoPE's older names itself, but only after a check that rejects them,
    and where layers have kinds, it does not read the field's older name.
    """
    copied = deepcopy(dict(fields))
    for name in ("rope_scaling", "rope_parameters"):
        rope = copied.get(name)
        if isinstance(rope, Mapping) and _rope_type(rope) in family.rope_aliases:
            copied[name] = {**rope, "rope_type": "longrope"}
        elif isinstance(rope, Mapping) and "type" in rope and family.windowed_theta is not None:
            copied[name] = {**rope, "rope_type": _rope_type(rope)}
    return copied


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def rope_object(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's RoPE parameters, under either name; the older one has precedence.

    transformers prefers it as well. Raises ConfigError for a value that is not an object.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if rope is not None and not isinstance(rope, Mapping):
            raise ConfigError(
                f"the model's config gives {name} = {quote(rope)}; it must be an object of "
                "RoPE parameters."
            )
    return dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})


def _check_numbers(rope: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError for RoPE parameters that are missing or out of range."""
    for name, number in {"rope_theta": _THETA_RANGE, **_REQUIRED[kind]}.items():
        if not number.allows(value := rope.get(name)):
            raise ConfigError(
                f"RoPE type {kind!r} needs {name} above 0, {number}; found {quote(value)}."
            )
    bool_field(rope, "truncate", True)
    for name, number in _OPTIONAL.items():
        if kind != "default" and rope.get(name) is not None:
            check_number(f"RoPE's {name}", rope[name], number)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ConfigError(
            f"RoPE type 'llama3' needs low_freq_factor below high_freq_factor, found "
            f"{rope['low_freq_factor']} and {rope['high_freq_factor']}."
        )


def _rotary_part(rope: dict[str, Any], fields: Mapping[str, Any], family: Family) -> Any:
    """Return the part of a head that rotates, and remove it from `rope`.

    In proportional RoPE it remains: dimensions that do not rotate have angles of zero. Raises
    ConfigError if it is invalid there.
    """
    if rope["rope_type"] == PROPORTIONAL:
        check_number("RoPE's partial_rotary_factor", rope.setdefault(_PART, 1.0), _PART_RANGE)
        return 1.0
    part = rope.pop(_PART, fields.get(_PART))
    return (family.partial_rotary or 1.0) if part is None else part


def _rotary_dim(head_dim: int, part: Any, family: Family) -> int:
    """Return the number of rotary dimensions of a head. Raises ConfigError if it is invalid."""
    if part == 1.0:
        if head_dim % 2:
            raise ConfigError(
                f"RoPE rotates pairs of dimensions, and the model's heads have {head_dim}."
            )
        return head_dim
    if family.partial_rotary is None:
        raise ConfigError(
            f"partial rotary embeddings (partial_rotary_factor = {quote(part)}) are not "
            "supported in this family."
        )
    rotary_dim = int(head_dim * part) if is_positive(part) and part < 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"partial_rotary_factor = {quote(part)} of {head_dim} dimensions per head is "
            "not an even number of dimensions."
        )
    return rotary_dim


def _check_long_factors(rope: Mapping[str, Any], count: int) -> None:
    """Raise ConfigError unless LongRoPE has short and long factors for `count` frequencies."""
    for name in _LONG_FACTORS:
        factors = rope.get(name)
        values = factors if isinstance(factors, list) else []
        if len(values) != count or not all(is_positive(factor) for factor in values):
            raise ConfigError(
                f"RoPE type 'longrope' needs {name}, a list of {count} numbers above 0, found "
                f"{str(factors)[:60]}."
            )
