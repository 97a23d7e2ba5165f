"""What values the fields of a model's config may have: types, and bounds that no model exceeds.

Beyond the bounds arithmetic overflows, or loops over layers do not end. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.errors import ConfigError

MAX_LAYERS = 100_000


def shown(value: Any) -> str:
    """Return a value as a message repeats it, cut to a reasonable length."""
    return f"{value!r:.60}"


@dataclass(frozen=True)
class Number:
    """The values a number may have, both bounds included."""

    low: float = 1
    high: float = 10**12
    whole: bool = True

    def allows(self, value: Any) -> bool:
        """Return whether a value is such a number: never true or false, NaN or an infinity."""
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
_PRESENT = {  # may be absent, not null
    "max_position_embeddings": COUNT,
    "rms_norm_eps": NORM_EPS,
}
_OPTIONAL = {  # null is as good as absent
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "original_max_position_embeddings": COUNT,
}


def check_number(name: str, value: Any, number: Number) -> None:
    """Raise ConfigError unless a config's field is such a number."""
    if not number.allows(value):
        raise ConfigError(f"the model's config gives {name} = {shown(value)}; it must be {number}.")


def is_positive(value: Any) -> bool:
    """Return whether this is a number above 0 that arithmetic does not exceed."""
    return SCALE.allows(value)


def check_fields(given: Mapping[str, Any]) -> None:
    """Refuse fields of a supported model that cannot be meant: of another type, or out of bounds.

    What only some families read is checked where it is read.

    Args:
        given: the fields of a config.json.

    Raises ConfigError, which names the field, its value and what is right.
    """
    for table in (_REQUIRED, _PRESENT, _OPTIONAL):
        for name, number in table.items():
            value = given.get(name)
            if name in given and not (value is None and table is _OPTIONAL):
                check_number(name, value, number)
    list_of(given, "layers_block_type", str)
    per_layer(given, "layer_types", str)
    for name in ("dtype", "torch_dtype"):
        value = given.get(name)  # a name, or what transformers has made of one
        if value is not None and not isinstance(value, str) and not f"{value}".startswith("torch."):
            raise ConfigError(
                f"the model's config gives {name} = {shown(value)}; it must be the name of a "
                "number format, such as bfloat16."
            )


def list_of(given: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Return the list that a field holds; null and what is absent are an empty one.

    Args:
        given: the fields of a config.json.
        name: the field's.
        kind: what the list is of: str or int.

    Raises ConfigError for anything else.
    """
    value = given.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ConfigError(
            f"the model's config gives {name} = {shown(value)}; it must be a list of "
            f"{'names' if kind is str else 'whole numbers'}."
        )
    return value


def per_layer(given: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Return a field's list as `list_of` does, which has an entry for each layer or none at all."""
    values, layers = list_of(given, name, kind), given["num_hidden_layers"]
    if values and len(values) != layers:
        raise ConfigError(
            f"the model's config gives {name} for {len(values)} layers, and "
            f"num_hidden_layers = {layers}."
        )
    return values


def flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return what a field says; null is false, too. Raises ConfigError for anything else."""
    value = given.get(name, default)
    if not isinstance(value, bool | None):
        raise ConfigError(
            f"the model's config gives {name} = {shown(value)}; it must be true or false."
        )
    return bool(value)
