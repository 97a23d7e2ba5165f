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
    "embedding_multiplier": REAL,
    "residual_multiplier": REAL,
    "attention_multiplier": REAL,
    "logits_scaling": REAL,
    "num_experts_per_tok": COUNT,
    "moe_intermediate_size": COUNT,
    "decoder_sparse_step": COUNT,
    "no_rope_layer_interval": COUNT,
}
_OPTIONAL = {  # null is as good as absent
    "num_key_value_heads": COUNT,
    "head_dim": COUNT,
    "original_max_position_embeddings": COUNT,
    "sliding_window": COUNT_OR_NONE,
    "num_local_experts": COUNT_OR_NONE,
    "num_experts": COUNT_OR_NONE,
}
_LISTS: dict[str, type] = {
    "layer_types": str,
    "layers_block_type": str,
    "mlp_only_layers": int,
    "no_rope_layers": int,
}
_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "half", "float", "double"),
    *("float8_e4m3fn", "float8_e5m2"),
)


def check_number(name: str, value: Any, number: Number) -> None:
    """Raise ConfigError unless a config's field is such a number."""
    if not number.allows(value):
        raise ConfigError(f"the model's config gives {name} = {shown(value)}; it must be {number}.")


def is_positive(value: Any) -> bool:
    """Return whether this is a number above 0 that arithmetic does not exceed."""
    return SCALE.allows(value)


def check_fields(given: Mapping[str, Any]) -> None:
    """Refuse fields of a supported model that cannot be meant: of another type, or out of bounds.

    Args:
        given: the fields of a config.json.

    Raises ConfigError, which names the field, its value and what is right.
    """
    for table in (_REQUIRED, _PRESENT, _OPTIONAL):
        for name, number in table.items():
            value = given.get(name)
            if name in given and not (value is None and table is _OPTIONAL):
                check_number(name, value, number)
    for name, kind in _LISTS.items():
        value = given.get(name)
        if value is not None and not _is_list(value, kind):
            raise ConfigError(
                f"the model's config gives {name} = {shown(value)}; it must be a list of "
                f"{'names' if kind is str else 'whole numbers'}."
            )
    for name in ("dtype", "torch_dtype"):
        value = given.get(name)  # a name, or what transformers has made of one
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
            raise ConfigError(
                f"the model's config gives {name} = {shown(value)}; it must be the name of a "
                "number format, such as bfloat16."
            )
    layers = given["num_hidden_layers"]
    for name in ("layer_types", "no_rope_layers"):
        if given.get(name) is not None and len(given[name]) != layers:
            raise ConfigError(
                f"the model's config gives {name} for {len(given[name])} layers, and "
                f"num_hidden_layers = {layers}."
            )


def flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return what a field says; null is false, too. Raises ConfigError for anything else."""
    value = given.get(name, default)
    if not isinstance(value, bool | None):
        raise ConfigError(
            f"the model's config gives {name} = {shown(value)}; it must be true or false."
        )
    return bool(value)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)
