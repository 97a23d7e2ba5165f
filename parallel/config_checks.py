"""Validation of the fields of a model's config: types, and bounds that no model exceeds.

Values beyond the bounds would overflow arithmetic or make loops over layers endless. Does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.errors import ConfigError

MAX_LAYERS = 100_000
MAX_EXPERTS = 1 << 12  # per layer
# kinds of layers in a config
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}  # their names in older configs
PREDICTORS = "mtp_num_hidden_layers"  # config field: multi-token-prediction blocks


def quote(value: Any) -> str:
    """Return a value as messages quote it, cut to 60 characters."""
    return f"{value!r:.60}"


@dataclass(frozen=True)
class Number:
    """The range of valid values of a number, both bounds included."""

    low: float = 1
    high: float = 10**12
    whole: bool = True

    def allows(self, value: Any) -> bool:
        """Return whether a value is a number in range; booleans, NaN and infinities are not."""
        if type(value) is not int and (self.whole or type(value) is not float):
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} of at least {self.low:g} and at most {self.high:,.15g}"


LAYERS = Number(high=MAX_LAYERS)
COUNT = Number()
COUNT_OR_NONE = Number(low=0)
NORM_EPS = Number(low=0, high=1, whole=False)
REAL = Number(low=0, high=1e9, whole=False)
SCALE = Number(low=1e-6, high=1e6, whole=False)

_REQUIRED = {
    "num_hidden_layers": LAYERS,
    "hidden_size": COUNT,
    "num_attention_heads": COUNT,
    "intermediate_size": COUNT,
    "vocab_size": COUNT,
}
_NOT_NULL = {  # optional, but never null
    "max_position_embeddings": COUNT,
    "rms_norm_eps": NORM_EPS,
    "layer_norm_eps": NORM_EPS,
}
_OPTIONAL = {  # null means absent
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "original_max_position_embeddings": COUNT,
}


def check_number(name: str, value: Any, number: Number) -> None:
    """Raise ConfigError unless the value of a config's field is in range."""
    if not number.allows(value):
        raise ConfigError(f"the model's config gives {name} = {quote(value)}; it must be {number}.")


def is_positive(value: Any) -> bool:
    """Return whether a value is a positive number within the bounds of SCALE."""
    return SCALE.allows(value)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check types and bounds of the fields that every supported model reads.

    Fields that only some families use are checked where they are read.

    Args:
        fields: those of a config.json.

    Raises ConfigError, which names the field, its value and the expected value.
    """
    for table in (_REQUIRED, _NOT_NULL, _OPTIONAL):
        for name, number in table.items():
            value = fields.get(name)
            if name in fields and not (value is None and table is _OPTIONAL):
                check_number(name, value, number)
    list_field(fields, "layers_block_type", str)
    per_layer_field(fields, "layer_types", str)
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)  # a name, or a torch.dtype from transformers
        if value is not None and not isinstance(value, str) and not f"{value}".startswith("torch."):
            raise ConfigError(
                f"the model's config gives {name} = {quote(value)}; it must be the name of "
                "a dtype, such as bfloat16."
            )


def list_field(fields: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Return the list in a field; an empty list if it is null or absent.

    Args:
        fields: those of a config.json.
        name: the field's name.
        kind: the type of the elements, str or int.

    Raises ConfigError for anything else.
    """
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(element, kind) for element in value):
        raise ConfigError(
            f"the model's config gives {name} = {quote(value)}; it must be a list of "
            f"{'names' if kind is str else 'whole numbers'}."
        )
    return value


def per_layer_field(fields: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Return the list in a field, as `list_field`; it is empty or has one entry per layer."""
    values, layers = list_field(fields, name, kind), fields["num_hidden_layers"]
    if values and len(values) != layers:
        raise ConfigError(
            f"the model's config gives {name} for {len(values)} layers, and "
            f"num_hidden_layers = {layers}."
        )
    return values


def bool_field(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the boolean in a field; null is false. Raises ConfigError for anything else."""
    value = fields.get(name, default)
    if not isinstance(value, bool | None):
        raise ConfigError(
            f"the model's config gives {name} = {quote(value)}; it must be true or false."
        )
    return bool(value)
