"""What a config says of RoPE, and the frequencies that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from parallel.config.families import Family
from parallel.config_checks import SCALE, Number, check_number, is_positive, shown
from parallel.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROPE_FACTOR = 64  # times as many positions
_THETA = Number(low=2, high=1e15, whole=False)
_FACTOR = Number(low=1, high=1e6, whole=False)
_POSITIONS = Number(low=2)
_NEEDED: dict[str, dict[str, Number]] = {  # the parameters without which a type means nothing
    "default": {},
    "linear": {"factor": _FACTOR},
    "dynamic": {"factor": _FACTOR},
    "yarn": {"factor": _FACTOR, "original_max_position_embeddings": _POSITIONS},
    "llama3": {
        "factor": _FACTOR,
        "original_max_position_embeddings": _POSITIONS,
        "low_freq_factor": SCALE,
        "high_freq_factor": SCALE,
    },
    "longrope": {"original_max_position_embeddings": _POSITIONS},
}
_OPTIONAL = {
    "factor": _FACTOR,
    "attention_factor": SCALE,
    "mscale": Number(low=0, high=1e6, whole=False),
    "mscale_all_dim": Number(low=0, high=1e6, whole=False),
    "beta_fast": SCALE,
    "beta_slow": SCALE,
}
_EXTENDED = ("yarn", "llama3", "longrope")  # these also know the positions of the training
_LONG_FACTORS = ("short_factor", "long_factor")


def rope_factor(rope: str) -> float:
    """Return by how much `yarn:FACTOR` stretches positions. Raises ConfigError for other words."""
    kind, _, given = rope.partition(":")
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if kind != "yarn" or not 1 < factor <= MAX_ROPE_FACTOR:
        raise ConfigError(
            f"`rope` {rope} is not known: use yarn:FACTOR, such as yarn:4, with a factor above 1 "
            f"and up to {MAX_ROPE_FACTOR}."
        )
    return factor


def read_rope(
    given: Mapping[str, Any], family: Family, head_dim: int
) -> tuple[dict[str, Any], int]:
    """Return rope_parameters as transformers writes them today, and the dimensions that turn.

    The config may be of any year. Of a head's dimensions the first turn. Raises ConfigError for a
    kind of RoPE that is not supported, and for numbers that are none.
    """
    rope = rope_object(given)
    rope["rope_type"] = _rope_type(rope)
    rope.setdefault("rope_theta", given.get("rope_theta", family.rope_theta))
    if rope["rope_type"] in family.rope_aliases:
        rope["rope_type"] = "longrope"
    kind = rope["rope_type"]
    if kind not in family.rope_types or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"RoPE type {shown(kind)} is not supported; supported are "
            f"{', '.join(family.rope_types)}, one for all layers."
        )
    part = rope.pop("partial_rotary_factor", given.get("partial_rotary_factor"))
    turning = _turning(head_dim, 1.0 if part is None else part, family)
    if kind in _EXTENDED:
        positions = given.get("max_position_embeddings", family.max_positions)
        # beside the others, it is the one meant
        beside = given.get("original_max_position_embeddings", family.original_positions)
        if beside is not None:
            rope["original_max_position_embeddings"] = beside
        rope.setdefault("original_max_position_embeddings", positions)
    _check_numbers(rope, kind)
    if kind == "longrope":
        _check_long_factors(rope, turning // 2)
    if kind == "dynamic" and turning < 4:
        raise ConfigError(f"RoPE type 'dynamic' needs more than the {turning} dimensions a head.")
    return rope, turning


def inverse_frequencies(
    rope: Mapping[str, Any], turning: int, max_positions: int, tokens: int
) -> tuple[Tensor, float]:
    """Return (D / 2,) float32 for D = `turning` dimensions, and the factor on cos and sin.

    `tokens` matters to the types that depend on a text's length. transformers computes them. A GGUF
    file may divide them by numbers of its own, in place of a type.
    """
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(rope)
    if rope["rope_type"] == "default":  # whose own module imports a compiler
        rope |= {"rope_type": "linear", "factor": 1.0}
    factors = rope.pop("frequency_factors", None)
    hf = LlamaConfig(
        hidden_size=turning,
        num_attention_heads=1,
        head_dim=turning,
        max_position_embeddings=max_positions,
        rope_parameters=rope,
    )
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    inverse, scale = compute(hf, torch.device("cpu"), seq_len=tokens)
    return inverse if factors is None else inverse / torch.tensor(factors), scale


def with_known_rope(given: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a config.json's fields with the type of RoPE by the name that transformers knows.

    It renames LongRoPE's older names too, but only behind a check that they do not pass. They are a
    copy, to be written to.
    """
    fields = deepcopy(dict(given))
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, Mapping) and _rope_type(rope) in family.rope_aliases:
            fields[name] = {**rope, "rope_type": "longrope"}
    return fields


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def rope_object(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says of RoPE, by either name. Raises ConfigError for what is no object.

    transformers, too, prefers the older one.
    """
    for name in ("rope_scaling", "rope_parameters"):
        said = given.get(name)
        if said is not None and not isinstance(said, Mapping):
            raise ConfigError(
                f"the model's config says of RoPE {shown(said)}, which is no object of parameters."
            )
    return dict(given.get("rope_scaling") or given.get("rope_parameters") or {})


def _check_numbers(rope: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError for parameters of a type of RoPE that are missing or no such numbers."""
    for name, number in {"rope_theta": _THETA, **_NEEDED[kind]}.items():
        if not number.allows(value := rope.get(name)):
            raise ConfigError(
                f"RoPE type {kind!r} needs {name} above 0, {number}; found {shown(value)}."
            )
    for name, number in _OPTIONAL.items():
        if kind != "default" and rope.get(name) is not None:
            check_number(f"RoPE's {name}", rope[name], number)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ConfigError(
            f"RoPE type 'llama3' needs low_freq_factor below high_freq_factor, found "
            f"{rope['low_freq_factor']} and {rope['high_freq_factor']}."
        )


def _turning(head_dim: int, part: Any, family: Family) -> int:
    """Return how many of a head's dimensions turn. Raises ConfigError."""
    if part == 1.0:
        if head_dim % 2:
            raise ConfigError(
                f"RoPE turns pairs of dimensions, and the model's heads have {head_dim}."
            )
        return head_dim
    if not family.partial_rotary:
        raise ConfigError(
            f"partial rotary embeddings (partial_rotary_factor = {shown(part)}) are not supported "
            "in this family."
        )
    turning = int(head_dim * part) if is_positive(part) and part < 1 else 0
    if turning < 2 or turning % 2:
        raise ConfigError(
            f"partial_rotary_factor = {shown(part)} of {head_dim} dimensions a head is not an even "
            "number of them."
        )
    return turning


def _check_long_factors(rope: Mapping[str, Any], count: int) -> None:
    """Raise ConfigError unless LongRoPE has a factor for each frequency, twice."""
    for name in _LONG_FACTORS:
        factors = rope.get(name)
        known = factors if isinstance(factors, list) else []
        if len(known) != count or not all(is_positive(factor) for factor in known):
            raise ConfigError(
                f"RoPE type 'longrope' needs {name}, a list of {count} numbers above 0, found "
                f"{str(factors)[:60]}."
            )
