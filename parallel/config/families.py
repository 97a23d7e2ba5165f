"""The model families as rows: what each one's config means, and what none of them may hold.

Everything here is read from config.json's fields, with neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parallel.config.unsupported import unsupported_reason, window_part
from parallel.config_checks import (
    COUNT,
    COUNT_OR_NONE,
    REAL,
    check_fields,
    check_number,
    flag,
    list_of,
    per_layer,
    shown,
)
from parallel.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
QKNorm = Literal["head", "width"]  # over each head's dimensions; over all heads' together


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls its experts, in the config and in the checkpoint."""

    intermediate: str  # the config's field
    block: str  # of a layer's tensors
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: how many MLPs there are in a layer, and of what size."""

    count: int
    per_token: int
    intermediate: int  # dimensions of one expert
    normalised: bool  # whether the weights of a token's experts sum to 1
    layers: frozenset[int]  # which have experts; the others have one MLP
    names: ExpertNames

    def __post_init__(self) -> None:
        sizes = (self.count, self.per_token, self.intermediate)
        whole = all(isinstance(size, int) and size >= 1 for size in sizes)
        if not whole or self.per_token > self.count:
            raise ConfigError(
                f"the model's config gives {self.per_token!r} of {self.count!r} experts to a "
                f"token, of {self.intermediate!r} dimensions each, which is no mixture of experts."
            )


@dataclass(frozen=True)
class Family:
    """What a config of one model_type means where it says nothing, as transformers fills it in.

    And what its layers have that those of Llama have not.
    """

    max_positions: int
    original_positions: int | None = None  # of LongRoPE
    kv_heads: int | None = None  # None: one for each attention head
    head_dim: int | None = None  # None: the hidden size over the attention heads
    norm_eps: float = 1e-6
    tied: bool = False
    stop_token: int | None = None
    rope_theta: float = 10_000.0
    rope_types: tuple[str, ...] = ROPE_TYPES
    rope_aliases: tuple[str, ...] = ()  # types that mean LongRoPE here
    partial_rotary: bool = False
    sliding_window: int | None = None
    uses_sliding_window: bool = True
    qkv_bias: bool = False  # always there
    optional_biases: tuple[str, ...] = ()  # fields that may ask for one
    qk_norm: QKNorm | None = None
    post_norm: bool = False
    fused_projections: bool = False  # one tensor for queries, keys and values, one for gate and up
    skips_rope: bool = False  # in the layers that no_rope_layers names
    multiplies: bool = False
    experts: ExpertNames | None = None


_BIASES = ("attention_bias", "mlp_bias")
FAMILIES = {
    "llama": Family(max_positions=2048, stop_token=2, optional_biases=_BIASES),
    "mistral": Family(max_positions=131_072, kv_heads=8, sliding_window=4096, stop_token=2),
    "qwen2": Family(
        max_positions=32_768,
        kv_heads=32,
        qkv_bias=True,
        sliding_window=4096,
        uses_sliding_window=False,
    ),
    "qwen3": Family(
        max_positions=32_768,
        kv_heads=32,
        head_dim=128,
        optional_biases=("attention_bias",),
        qk_norm="head",
        sliding_window=4096,
        uses_sliding_window=False,
    ),
    "smollm3": Family(
        max_positions=32_768,
        kv_heads=4,
        tied=True,
        stop_token=128_001,
        rope_theta=2_000_000.0,
        optional_biases=_BIASES,
        skips_rope=True,
        uses_sliding_window=False,
    ),
    "qwen3_moe": Family(
        max_positions=32_768,
        kv_heads=4,
        optional_biases=("attention_bias",),
        qk_norm="head",
        sliding_window=4096,
        uses_sliding_window=False,
        experts=ExpertNames(
            "moe_intermediate_size", "mlp", gate="gate_proj", up="up_proj", down="down_proj"
        ),
    ),
    "mixtral": Family(
        max_positions=131_072,
        kv_heads=8,
        norm_eps=1e-5,
        stop_token=2,
        rope_theta=1_000_000.0,
        experts=ExpertNames("intermediate_size", "block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "phi3": Family(
        max_positions=4096,
        original_positions=4096,
        norm_eps=1e-5,
        stop_token=32_000,
        rope_types=("default", "longrope"),
        rope_aliases=("su", "yarn"),
        partial_rotary=True,
        fused_projections=True,
    ),
    "olmo2": Family(
        max_positions=2048,
        norm_eps=1e-5,
        stop_token=50_279,
        optional_biases=("attention_bias",),
        qk_norm="width",
        post_norm=True,
    ),
    "granite": Family(max_positions=2048, stop_token=2, optional_biases=_BIASES, multiplies=True),
}

_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


def family_of(given: Mapping[str, Any]) -> Family:
    """Return the family of a config.json's fields.

    Raises ConfigError for a model with parts that are not supported, and says which.
    """
    kind = given.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    window = None if family is None else window_part(given, *_window_fields(given, family))
    if (reason := unsupported_reason(given, FAMILIES, window)) or family is None:
        raise ConfigError(str(reason))
    check_fields(given)
    if kind == "mistral" and "layer_types" in given:
        raise ConfigError("layer_types in a mistral config is not supported: it means Ministral.")
    act = given.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"activation {shown(act)} is not supported; these families use silu.")
    return family


def missing_fields(given: Mapping[str, Any]) -> list[str]:
    """Return the fields of a supported model that a config.json must have and has not.

    transformers would put some other model's numbers in their place.
    """
    family = FAMILIES.get(str(given.get("model_type")))
    if family is None:
        return []
    needed = list(_NEEDED)
    if family.experts is not None:
        needed += ["num_experts_per_tok", family.experts.intermediate]
        needed += [] if expert_count(given) is not None else ["num_experts"]
    return [name for name in needed if name not in given]


def expert_count(given: Mapping[str, Any]) -> Any:
    """Return the experts of a layer, whichever of its two names the config uses."""
    return given.get(_count_field(given))


def _count_field(given: Mapping[str, Any]) -> str:
    return "num_local_experts" if "num_local_experts" in given else "num_experts"


def read_experts(given: Mapping[str, Any], names: ExpertNames) -> MoEConfig | None:
    """Return the mixture of experts that a config.json's fields tell; None where no layer has one.

    Raises ConfigError for numbers that are none.
    """
    count = expert_count(given)
    if count is None:
        return None
    check_number(_count_field(given), count, COUNT_OR_NONE)
    step = given.get("decoder_sparse_step", 1)
    check_number("decoder_sparse_step", step, COUNT)
    dense = list_of(given, "mlp_only_layers", int)
    layers = range(given["num_hidden_layers"])
    sparse = frozenset(each for each in layers if each not in dense and (each + 1) % step == 0)
    if not count or not sparse:
        return None
    for name in ("num_experts_per_tok", names.intermediate):
        check_number(name, given[name], COUNT)
    return MoEConfig(
        count=count,
        per_token=given["num_experts_per_tok"],
        intermediate=given[names.intermediate],
        # Mixtral's always do
        normalised=flag(given, "norm_topk_prob", given["model_type"] == "mixtral"),
        layers=sparse,
        names=names,
    )


def nope_layers(given: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers without RoPE, as SmolLM3's config tells them."""
    layers = range(given["num_hidden_layers"])
    turns = per_layer(given, "no_rope_layers", int)  # which says of each layer whether it has RoPE
    if not turns:
        interval = given.get("no_rope_layer_interval", 4)
        check_number("no_rope_layer_interval", interval, COUNT)
        turns = [(layer + 1) % interval for layer in layers]
    return frozenset(layer for layer in layers if not turns[layer])


def multipliers(given: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Return Granite's factors. Its attention_multiplier takes the place of head_dim ** -0.5."""
    found = {f"{part}_multiplier": 1.0 for part in ("embedding", "residual", "attention")}
    found["logits_scaling"] = 1.0
    for name in found:
        found[name] = given.get(name, 1.0)
        check_number(name, found[name], REAL)
    query = found.pop("attention_multiplier") * head_dim**0.5
    return {**found, "query_multiplier": query}


def active_window(given: Mapping[str, Any], family: Family) -> int | None:
    """Return the tokens that attention sees at most, None where it sees all.

    Raises ConfigError for a window of fewer tokens than `max_position_embeddings`. One of fewer
    than RoPE stretches these to only limits the context.
    """
    window, is_used, positions = _window_fields(given, family)
    is_used = flag({"use_sliding_window": is_used}, "use_sliding_window", False)
    if is_used and window not in (None, False):
        check_number("sliding_window", window, COUNT_OR_NONE)
    if window and is_used:
        if window < positions:
            raise ConfigError(
                f"sliding-window attention (sliding_window = {window}, of {positions} positions) "
                "is not supported: every layer must see the whole context."
            )
        return int(window)
    if "sliding_attention" in (given.get("layer_types") or ()):
        raise ConfigError(
            "layer_types with sliding_attention is not supported: every layer must see the whole "
            "context."
        )
    return None


def _window_fields(given: Mapping[str, Any], family: Family) -> tuple[Any, Any, Any]:
    """Return a config's window, whether it is used, and positions, filled in as by transformers."""
    return (
        given.get("sliding_window", family.sliding_window),
        given.get("use_sliding_window", family.uses_sliding_window),
        given.get("max_position_embeddings", family.max_positions),
    )
