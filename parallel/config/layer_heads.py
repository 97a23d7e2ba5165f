"""The heads of layers with full attention, where they are not what most configs say.

Those of Gemma 4 differ from those with a window. Those of latent attention are one KV head.

Everything is read from config.json's fields; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from offload.layout import SlidingWindow
from parallel.config_checks import COUNT, bool_field, check_number, quote
from parallel.errors import ConfigError

LATENT_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
_GLOBAL_HEAD_DIM = 512  # transformers' default
_OVERRIDES = {"head_dim", "num_key_value_heads"}


class LatentShape(NamedTuple):
    """Dimensions of multi-head latent attention.

    Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    query_rank: int | None  # dimensions of queries' own latents, if they have such
    rank: int  # dimensions of a token's latent, from which heads compute keys and values
    rope_dim: int  # rotated dimensions of queries, and of the key that all heads share
    plain_dim: int  # dimensions of a head's other queries and keys
    value_dim: int

    @property
    def head_dim(self) -> int:
        """The dimensions of what is kept of a token: the rotated key, and the latent."""
        return self.rope_dim + self.rank

    @property
    def query_dim(self) -> int:
        """The dimensions of a head's query."""
        return self.plain_dim + self.rope_dim

    @property
    def own_dim(self) -> int:
        """The dimensions of keys and values of each head in a prompt, padded to the larger."""
        return max(self.query_dim, self.value_dim)

    def has_own_kv(self, rows: int) -> bool:
        """Return whether in a chunk of a prompt each head has its own keys and values.

        With so many rows attending to them, these take fewer multiplications than latents.
        """
        saved = 2 * (self.head_dim - self.own_dim)  # multiplications of a row and a token
        return rows * saved > self.rank * (self.plain_dim + self.value_dim)


def latent_shape(fields: Mapping[str, Any]) -> LatentShape:
    """Return the dimensions of latent attention. Raises ConfigError for invalid ones."""
    value_dim: Any = fields.get("v_head_dim")
    if value_dim is None and fields["model_type"] == "minicpm3":
        value_dim = fields["hidden_size"] // fields["num_attention_heads"]
    rank, rope_dim, plain_dim = (fields[name] for name in LATENT_FIELDS)
    shape = LatentShape(fields.get("q_lora_rank"), rank, rope_dim, plain_dim, value_dim)
    names = ("q_lora_rank", *LATENT_FIELDS, "v_head_dim")
    for name, size in zip(names, shape, strict=True):
        if name != "q_lora_rank" or size is not None:
            check_number(name, size, COUNT)
    return shape


def shares_keys(fields: Mapping[str, Any]) -> bool:
    """Return whether keys and values of layers with full attention are one projection."""
    return bool_field(fields, "attention_k_eq_v", False)


def full_attention_heads(
    fields: Mapping[str, Any], kv_heads: int, head_dim: int, windows: SlidingWindow | None
) -> tuple[int, int]:
    """Return the KV heads of layers with full attention, and their dimensions.

    `kv_heads` and `head_dim` are those of layers with a window. Raises ConfigError for layers that
    differ otherwise.
    """
    by_layer = fields.get("per_layer_config")
    own: dict[str, Any] = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if by_layer is None:
        heads = fields.get("num_global_key_value_heads") if shares_keys(fields) else None
        own["num_key_value_heads"] = kv_heads if heads is None else heads
        own["head_dim"] = fields.get("global_head_dim", _GLOBAL_HEAD_DIM)
    elif by_layer != {}:
        layers = set(range(fields["num_hidden_layers"]))
        own |= _shared_overrides(by_layer, layers - (windows.layers if windows else set()))
    for name, value in own.items():
        check_number(f"{name} of full attention", value, COUNT)
    return own["num_key_value_heads"], own["head_dim"]


def _shared_overrides(by_layer: Any, layers: Collection[int]) -> dict[str, Any]:
    """Return what a per_layer_config says of all layers with full attention, and of no other."""
    entries = by_layer.items() if isinstance(by_layer, Mapping) else ()
    overrides = {  # numbers may begin with zeros
        int(layer) if str(layer).isdecimal() else layer: dict(each)
        for layer, each in entries
        if isinstance(each, Mapping)
    }
    own = next(iter(overrides.values()), {})
    is_uniform = all(each == own for each in overrides.values())
    if set(overrides) != set(layers) or not is_uniform or not own.keys() <= _OVERRIDES:
        raise ConfigError(
            f"the model's config gives per_layer_config = {quote(by_layer)}; it must give heads "
            "of the same number and size for all layers of full_attention, and for no others."
        )
    return own
