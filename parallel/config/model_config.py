"""What a model is: the one place that reads Hugging Face configs and knows their quirks.

There are two ways in. `from_pretrained` lets transformers read the file, which refuses what is
broken; an engine loads by it. `find` reads the same numbers with neither torch nor transformers,
for a plan that has to answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import one_line
from offload.layout import KVLayout, ceil_div
from parallel.config.config_file import config_file, fields_for_transformers, read_fields
from parallel.config.families import (
    FAMILIES,
    MoEConfig,
    QKNorm,
    active_window,
    family_of,
    multipliers,
    nope_layers,
    read_experts,
)
from parallel.config.positions import (
    addressable_positions,
    context_notes,
    dense_positions,
    trained_positions,
)
from parallel.config.rope import MAX_ROPE_FACTOR, inverse_frequencies, read_rope, rope_factor
from parallel.config_checks import COUNT, LAYERS, NORM_EPS, check_number, flag, is_positive
from parallel.errors import ConfigError
from parallel.formats.gguf_header import read_header
from parallel.formats.gguf_names import config_fields
from parallel.formats.hub import NotFound, fetch_config
from parallel.formats.locate import find_local, is_gguf
from parallel.ranks.partition import check_ranks, share_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload.rotary import Rotary


_COUNTS = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "query_multiplier", "logits_scaling")
_ALIASES = {"float": "float32", "half": "float16", "double": "float64"}


def token_ids(given: Any) -> frozenset[int]:
    """Return a set for what Hugging Face writes as one id, a list of ids or nothing.

    Raises ConfigError for anything else.
    """
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(
            f"eos_token_id must be a token id or a list of them, found {json.dumps(given)[:80]}."
        )
    return frozenset(ids)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the families. Counts are of the whole model, not of one rank."""

    family: str  # a name in FAMILIES
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str | None  # such as bfloat16; None: the config does not say, the tensors do
    stop_tokens: frozenset[int]  # end-of-sequence ids
    rope: dict[str, Any] = field(hash=False)  # transformers' rope_parameters
    rotary_dim: int  # of a head's dimensions, the first so many turn
    # of these no KV depends, and so no digest (`repr`): the positions that the config names beside
    # RoPE's factor; those beyond which the model was made for dual chunk attention, which is not
    # computed; and tokens that attention sees at most
    trained_positions: int | None = field(default=None, repr=False)
    dense_positions: int | None = field(default=None, repr=False)
    window: int | None = field(default=None, repr=False)
    nope_layers: frozenset[int] = frozenset()  # layers without RoPE
    qk_norm: QKNorm | None = None
    post_norm: bool = False  # attention and MLP have their norm behind them, not before
    fused_projections: bool = (
        False  # the checkpoint stacks queries, keys and values, and gate and up
    )
    experts: MoEConfig | None = None  # in the layers it names, in place of one MLP
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add
    query_multiplier: float = 1.0  # on top of head_dim ** -0.5
    logits_scaling: float = 1.0  # logits are divided by it

    def __post_init__(self) -> None:
        check_number("layers", self.layers, LAYERS)
        for name in _COUNTS:
            check_number(name, getattr(self, name), COUNT)
        check_number("norm_eps", self.norm_eps, NORM_EPS)
        for name in _MULTIPLIERS:
            if not is_positive(getattr(self, name)):
                raise ConfigError(
                    f"the model's config gives {name} = {getattr(self, name)!r}; it must be a "
                    "number above 0."
                )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"the model's {self.heads} attention heads do not divide into {self.kv_heads} "
                "key/value heads."
            )

    @classmethod
    def from_pretrained(cls, folder: Path) -> ModelConfig:
        """Read config.json in `folder` through transformers, which refuses what is broken.

        `folder` may also be a GGUF file, which says the same in its metadata. Raises ConfigError
        for what is missing, broken or not supported, CheckpointError for a broken GGUF file.
        """
        if is_gguf(folder):
            return _read(folder)
        path = config_file(folder)
        given = read_fields(path)
        read = _checked(path, given)  # which says what is wrong in words of ours
        from transformers import CONFIG_MAPPING

        try:
            fields = fields_for_transformers(given, FAMILIES[read.family])
            hf = CONFIG_MAPPING[read.family].from_dict(fields)
            return replace(cls.from_hf(hf, given), dtype=read.dtype)
        except ConfigError:
            raise
        except Exception as error:  # whatever the broken field happens to break
            raise ConfigError(f"{path} cannot be read: {one_line(error):.300}") from error

    @classmethod
    def from_name(cls, name: str) -> ModelConfig:
        """Read the config of a folder, a GGUF file, a config.json, or a model on the hub.

        Needs neither torch nor transformers, and of a model on the hub fetches nothing else.
        Raises ConfigError, and CheckpointError for a broken GGUF file.
        """
        path = find_local(name) or Path(name)
        if path.is_dir():
            return _read(config_file(path))
        if path.is_file():
            if not is_gguf(path) and path.suffix != ".json":
                raise ConfigError(f"{path} is no GGUF file and no config.json: give a folder.")
            return _read(path)
        try:
            return _read(fetch_config(name))
        except NotFound as error:
            raise ConfigError(
                f"{name} is neither a folder, a config.json nor a model the hub could give "
                f"({error})."
            ) from error

    @classmethod
    def from_hf(cls, hf: Any, said: Mapping[str, Any] | None = None) -> ModelConfig:
        """Take the numbers of a transformers config. Raises ConfigError.

        `said`: the fields of the config.json that it was made of, where there is one; transformers
        fills in what a config leaves out of RoPE's parameters.
        """
        if hf.model_type in FAMILIES:
            # a parameter beside rope_parameters counts when the frequencies are computed
            hf.standardize_rope_params()
        return cls.from_fields({**vars(hf), "model_type": hf.model_type}, said)

    @classmethod
    def from_fields(
        cls, given: Mapping[str, Any], said: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Take the fields of a config.json; what is absent means what transformers would fill in.

        `said`: the same before anything was filled in. Raises ConfigError for a model that is not
        supported.
        """
        family = family_of(given)
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        head_dim = given.get("head_dim") or family.head_dim
        if head_dim is None and hidden % heads:
            raise ConfigError(
                f"the model's config gives hidden_size = {hidden}, which does not divide into "
                f"num_attention_heads = {heads}, and no head_dim."
            )
        head_dim = head_dim or hidden // heads
        rope, rotary_dim = read_rope(given, family, head_dim)
        biases = {name: flag(given, name, False) for name in family.optional_biases}
        attention_bias = biases.get("attention_bias", False)
        max_positions = given.get("max_position_embeddings", family.max_positions)
        trained = trained_positions(given if said is None else said)
        dtype = given.get("dtype") or given.get("torch_dtype")
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        return cls(
            family=given["model_type"],
            layers=given["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=given.get("num_key_value_heads", family.kv_heads) or heads,
            head_dim=head_dim,
            intermediate=given["intermediate_size"],
            vocab=given["vocab_size"],
            norm_eps=given.get("rms_norm_eps", family.norm_eps),
            max_positions=max_positions,
            tied=flag(given, "tie_word_embeddings", family.tied),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=biases.get("mlp_bias", False),
            dtype=None if name is None else _ALIASES.get(name, name),
            stop_tokens=token_ids(given.get("eos_token_id", family.stop_token)),
            rope=rope,
            rotary_dim=rotary_dim,
            trained_positions=trained,
            dense_positions=dense_positions(given),
            window=active_window(given, family),
            nope_layers=nope_layers(given) if family.skips_rope else frozenset(),
            qk_norm=family.qk_norm,
            post_norm=family.post_norm,
            fused_projections=family.fused_projections,
            experts=None if family.experts is None else read_experts(given, family.experts),
            **(multipliers(given, head_dim) if family.multiplies else {}),
        )

    def with_rope_scaling(self, rope: str | None) -> ModelConfig:
        """Return this model with its positions stretched, for texts longer than it was trained on.

        `yarn:4` stands for YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.4) with factor 4, as
        transformers computes it: four times as many positions. None changes nothing. Raises
        ConfigError for what is not known, and for a model that is stretched already.
        """
        if rope is None:
            return self
        factor = rope_factor(rope)
        if self.rope["rope_type"] == "yarn" and self.rope["factor"] == factor:
            return self
        if self.rope["rope_type"] != "default" or "frequency_factors" in self.rope:
            raise ConfigError(
                f"`rope` {rope}: the model stretches its positions itself, by RoPE type "
                f"{self.rope['rope_type']!r} or by factors of its own: it has {self.max_context}."
            )
        positions = int(self.max_positions * factor)
        if self.window is not None and self.window < positions:
            raise ConfigError(
                f"`rope` {rope} makes {positions} positions, but the model's attention sees "
                f"{self.window} tokens at most (sliding_window)."
            )
        stretched = {
            **self.rope,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.max_positions,
        }
        return replace(
            self, rope=stretched, trained_positions=self.max_positions, max_positions=positions
        )

    def check_context(self, tokens: int) -> None:
        """Raise ConfigError for a text of more tokens than there are positions."""
        limit = self.max_context
        if tokens <= limit:
            return
        factor, hint = ceil_div(tokens, limit), ""
        plain = self.rope["rope_type"] == "default" and "frequency_factors" not in self.rope
        if plain and factor <= MAX_ROPE_FACTOR and (self.window or inf) >= factor * limit:
            hint = f"; `rope` yarn:{factor} would stretch them"
        raise ConfigError(f"`context` {tokens} is more than the model's {limit} positions{hint}.")

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer has a mixture of experts, not one MLP."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def max_context(self) -> int:
        """Tokens the model can address: its positions, stretched where the config counts those of
        the training, and no more than attention sees.
        """
        positions, _ = addressable_positions(self.rope, self.max_positions, self.trained_positions)
        return min(positions, self.window or positions)

    @property
    def context_limit(self) -> int:
        """Tokens of a text where no other number is given: less than `max_context` where the model
        would need attention of another kind beyond them.
        """
        return min(self.max_context, self.dense_positions or self.max_context)

    def context_notes(self) -> list[str]:
        """Return what is to be known of these numbers, a sentence each."""
        return context_notes(
            self.rope, self.max_positions, self.trained_positions, self.dense_positions
        )

    def inverse_frequencies(self, tokens: int, length: int | None = None) -> tuple[Tensor, float]:
        """Return (rotary_dim / 2,) float32 and the factor on cos and sin.

        Takes what `rotary` takes; `length` is by default that of the prompt.
        """
        if self.rope["rope_type"] == "longrope" and length is not None:
            tokens = length
        return inverse_frequencies(self.rope, self.rotary_dim, self.max_positions, tokens)

    def rope_key(self, tokens: int, length: int) -> bytes:
        """Return a key that is equal for texts with the same angles; takes what `rotary` takes."""
        frequencies, scale = self.inverse_frequencies(tokens, length)
        return frequencies.numpy().tobytes() + str(scale).encode()

    def rotary(self, tokens: int, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return the tables for positions up to `length`, for a prompt of `tokens` tokens.

        All keys of a text share one base, so what depends on a text's length is fixed before it
        begins. Dynamic NTK takes the prompt's length. LongRoPE takes `length`, the prompt with all
        that may follow: its long factors hold for the whole text if that exceeds the positions of
        the training. transformers changes over in the middle of such a text, and reads it again.
        """
        from offload.rotary import Rotary

        frequencies, scale = self.inverse_frequencies(tokens, length)
        return Rotary(frequencies, scale, length, dtype, device, self.nope_layers)

    def kv_layout(self, ranks: int, dtype: torch.dtype, rank: int | None = None) -> KVLayout:
        """Return the KV geometry of one of `ranks` ranks.

        Without `rank` it is the last one's, which holds no fewer heads than any other. Raises
        ConfigError when there are too few heads.
        """
        check_ranks(self.kv_heads, ranks)
        heads = share_size(self.kv_heads, ranks - 1 if rank is None else rank, ranks)
        return KVLayout(self.layers, heads, self.head_dim, dtype, self.heads // self.kv_heads)


def _read(path: Path) -> ModelConfig:
    given = config_fields(read_header(path)) if is_gguf(path) else read_fields(path)
    return _checked(path, given)


def _checked(path: Path, given: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a file's fields. Raises ConfigError, which names the file."""
    try:
        return ModelConfig.from_fields(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # whatever the broken field happens to break
        raise ConfigError(f"{path} cannot be read: {one_line(error):.300}") from error
