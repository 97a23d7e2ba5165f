"""The model configuration: the only module that interprets Hugging Face configs and their quirks.

There are two entry points. `from_pretrained` reads the file through transformers, which rejects
broken configs; an engine loads a model with it. `from_name` reads the same values with neither
torch nor transformers, for a plan that has to be fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import one_line
from offload.layout import HeadShape, KVLayout, RecurrentShape, SlidingWindow, ceil_div
from parallel.config.config_file import ConfigFile, config_file, fields_for_transformers
from parallel.config.families import (
    FAMILIES,
    MLP,
    PRE_NORMS,
    Activation,
    Family,
    MlpNames,
    MoEConfig,
    Norms,
    QKNorm,
    cohere_multipliers,
    family_of,
    gemma4_numbers,
    gemma_multipliers,
    minicpm_multipliers,
    multipliers,
    nope_layers,
    read_experts,
)
from parallel.config.layer_heads import (
    LatentShape,
    full_attention_heads,
    latent_shape,
    shares_keys,
)
from parallel.config.positions import (
    addressable_positions,
    context_notes,
    dense_positions,
    trained_positions,
)
from parallel.config.recurrent import (
    predicts,
    rank_shape,
    recurrent_shape,
    split_heads,
    unused_layers,
)
from parallel.config.rope import (
    MAX_ROPE_FACTOR,
    QueryScaling,
    inverse_frequencies,
    latent_multiplier,
    query_scaling,
    read_rope,
    read_windowed_rope,
    rope_factor,
)
from parallel.config.text_model import GROUPED_QKV, WRAPPER
from parallel.config.windows import sliding_window
from parallel.config_checks import COUNT, LAYERS, NORM_EPS, bool_field, check_number, is_positive
from parallel.config_layers import SplitLayers, read_split_layers, with_whole_layers
from parallel.errors import ConfigError
from parallel.formats.gguf.families import family_of as family_of_file
from parallel.formats.gguf.header import GgufHeader, read_header
from parallel.formats.gguf.metadata import config_fields, kept_types
from parallel.formats.hub import GgufName, NotFound, fetch_config
from parallel.formats.locate import find_local, is_gguf
from parallel.formats.plane_format import KeptType
from parallel.formats.weight_headers import EMBEDDING, HEAD, PREDICTION
from parallel.ranks.partition import check_ranks, share_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload.rotary import Rotary


_COUNTS = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "query_multiplier", "logits_scaling")
_OF_FILES = ("dtype", "wrapper", "has_predictor", "unused_layers")  # not of transformers' config
_ALIASES = {"float": "float32", "half": "float16", "double": "float64"}


def token_ids(value: Any) -> frozenset[int]:
    """Return the set of token ids that Hugging Face writes as one id, a list of ids or null.

    Raises ConfigError for anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(
            f"eos_token_id must be a token id or a list of them, found {json.dumps(value)[:80]}."
        )
    return frozenset(ids)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of a supported family. Sizes are those of the whole model, not of one rank."""

    family: str  # a key of FAMILIES
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
    dtype: str | None  # such as bfloat16; None: that of the tensors
    stop_tokens: frozenset[int]  # end-of-sequence ids
    rope: dict[str, Any] = field(hash=False)  # transformers' rope_parameters
    rotary_dim: int  # number of dimensions of a head that RoPE rotates, from the first
    # The KV does not depend on the fields up to `kept_types`, so the digest (`repr`) leaves them
    # out: the training positions, if the config names them beside RoPE's factor;
    trained_positions: int | None = field(default=None, repr=False)
    # the positions beyond which the model expects dual chunk attention, which is not implemented;
    dense_positions: int | None = field(default=None, repr=False)
    # the maximum number of tokens that attention sees.
    window: int | None = field(default=None, repr=False)
    # Model type of the config that this one is a part of, such as a vision model's
    wrapper: str | None = field(default=None, repr=False)
    # Matrices that stay packed as in their file, by name, and how; the weights are the same. There
    # are thousands, and planning looks up results by their config: they are compared, not hashed.
    kept_types: tuple[tuple[str, KeptType], ...] = field(default=(), repr=False, hash=False)
    # Whether the files hold a block that predicts the token after the next (`predictor_config`)
    has_predictor: bool = field(default=False, repr=False)
    # whether this is such a block, which shares its model's embedding and head
    is_predictor: bool = field(default=False, repr=False)
    # Layers after the model's own in its files, which predict further tokens and are not used
    unused_layers: int = field(default=0, repr=False)
    # whether a tensor of Q, K and V has the heads of one KV head after those of another
    grouped_qkv: bool = field(default=False, repr=False)
    sliding_window: SlidingWindow | None = None  # and the layers that have one
    # RoPE of layers with a window, if it is another
    windowed_rope: dict[str, Any] | None = field(default=None, hash=False)
    nope_layers: frozenset[int] = frozenset()  # layers without RoPE
    qk_norm: QKNorm | None = None
    norms: Norms = PRE_NORMS  # names of a layer's norms in the checkpoint
    fused_qkv: bool = False  # the checkpoint stacks Q, K and V
    mlp_names: MlpNames = MLP  # names of a dense MLP in the checkpoint
    activation: Activation = "silu"
    # the checkpoint's Q and K are for RoPE that rotates adjacent dimensions; loading reorders them
    interleaved_rope: bool = False
    experts: MoEConfig | None = None  # replaces the dense MLP in the layers it lists
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # scale of the outputs of attention and MLP
    query_multiplier: float = 1.0  # in addition to head_dim ** -0.5
    logits_scaling: float = 1.0  # divisor of the logits
    is_gemma: bool = False  # the embedding multiplier has the model's dtype, as in Gemma 3 and 4
    float32_norms: bool = False
    offset_norms: bool = False  # norms multiply by 1 + weight
    is_cohere: bool = False  # LayerNorm, and one for attention and an MLP that is parallel to it
    query_scaling: QueryScaling | None = None
    windowed_heads: HeadShape | None = None  # those of layers with a window, if they are others
    has_shared_values: bool = False  # layers with full attention project keys and values at once
    # latent attention, whose one KV head all ranks have, each with its share of the query heads
    latent: LatentShape | None = None
    logits_cap: float | None = None  # logits are cap * tanh(logits / cap)
    is_gemma4: bool = False  # norms of values, no scale of attention, and a number for each layer
    has_sinks: bool = False  # heads have learned logits beside those of the keys
    recurrent: RecurrentShape | None = None  # and its layers, with the heads of the whole model
    has_output_gates: bool = False  # attention's outputs are multiplied by gates
    split_layers: SplitLayers | None = None  # None: a layer's parts are one layer of the checkpoint

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
        windowed = self.windowed_heads
        for kv_heads in {self.kv_heads, self.kv_heads if windowed is None else windowed.heads}:
            if self.heads % kv_heads:
                raise ConfigError(
                    f"the model's {self.heads} attention heads do not divide into {kv_heads} "
                    "key/value heads."
                )

    @classmethod
    def from_pretrained(cls, folder: Path, packed: bool = False) -> ModelConfig:
        """Read config.json in `folder` through transformers, which rejects broken configs.

        `folder` may also be a GGUF file, whose metadata is read instead. With `packed`, the
        `kept_types` are those of its quantised matrices. Raises ConfigError if the config is
        missing, broken or not supported, CheckpointError for a broken GGUF file.
        """
        if is_gguf(folder):
            return _gguf_config(folder, read_header(folder), packed)
        path = config_file(folder)
        file = ConfigFile.read(path)
        fields = file.fields
        config = _parse(path, fields)  # has clearer error messages than transformers
        from transformers import CONFIG_MAPPING

        try:
            hf_fields = fields_for_transformers(fields, FAMILIES[config.family])
            hf = CONFIG_MAPPING[config.family].from_dict(hf_fields)
            read = cls.from_hf(hf, fields)
            own = {name: getattr(config, name) for name in _OF_FILES}
            config = replace(read, **own)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises any type for a broken field
            raise ConfigError(f"{path} cannot be read: {one_line(error):.300}") from error
        return _with_kept_types(config, file.with_headers().kept_types()) if packed else config

    @classmethod
    def from_name(cls, name: str, packed: bool = False) -> ModelConfig:
        """Read the config of a folder, a GGUF file, a config.json, or a model on the hub.

        Imports neither torch nor transformers, and fetches only config.json from the hub, with
        the headers of quantised weights, or the header of a GGUF file (`owner/repo:Q4_K_M`,
        `owner/repo/file.gguf`). Raises ConfigError, and CheckpointError for a broken file.
        """
        path = find_local(name) or Path(name)
        if path.is_dir():
            return _read_config(config_file(path), packed)
        if path.is_file():
            if not is_gguf(path) and path.suffix != ".json":
                raise ConfigError(
                    f"{path} is neither a GGUF file nor a config.json: give a folder."
                )
            if is_gguf(path):
                return _gguf_config(path, read_header(path), packed)
            return _read_config(path, packed)
        try:
            file = GgufName.parse(name)
            if file is None:
                return _read_config(fetch_config(name), packed, name)
            with file.header() as header:
                return _gguf_config(Path(name), header, packed)
        except NotFound as error:
            raise ConfigError(
                f"{name} is neither a folder, a config.json nor a model found on the hub ({error})."
            ) from error

    @classmethod
    def from_hf(cls, hf: Any, source_fields: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the config equivalent to a transformers config. Raises ConfigError.

        `source_fields`: the fields of the config.json it was made from, if any; transformers fills
        in RoPE parameters that a config.json leaves out.
        """
        if hf.model_type in FAMILIES:
            # moves parameters beside rope_parameters into it, where the frequencies use them
            hf.standardize_rope_params()
        fields = {**vars(hf), "model_type": hf.model_type}
        if hf.model_type == "gemma4_text":
            fields["per_layer_config"] = hf.to_dict().get("per_layer_config")
        return cls.from_fields(fields, source_fields)

    @classmethod
    def from_fields(
        cls, fields: Mapping[str, Any], source_fields: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Return the config of a config.json's fields, with transformers' defaults for absent ones.

        `source_fields`: the fields before any default was filled in. Raises ConfigError for a model
        that is not supported.
        """
        fields, split = _with_whole_layers(fields)
        family = family_of(fields)
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        latent = latent_shape(fields) if family.has_latents else None
        head_dim = fields.get("head_dim", family.head_dim) if latent is None else latent.head_dim
        if head_dim is None and hidden % heads:
            raise ConfigError(
                f"the model's config gives hidden_size = {hidden}, which does not divide into "
                f"num_attention_heads = {heads}, and no head_dim."
            )
        head_dim = head_dim or hidden // heads
        windows, limit = sliding_window(fields, family)
        kv_heads = fields.get("num_key_value_heads", family.kv_heads) or heads
        windowed_heads = None
        if family.is_gemma4:
            windowed_heads = HeadShape(kv_heads, head_dim, heads // kv_heads)
            kv_heads, head_dim = full_attention_heads(fields, kv_heads, head_dim, windows)
        if latent is not None:
            kv_heads = 1
        rotated = head_dim if latent is None else latent.rope_dim
        rope, rotary_dim = read_rope(fields, family, rotated)
        nope = nope_layers(fields) if family.has_nope_layers else frozenset()
        window = fields.get("sliding_window", family.sliding_window)
        if family.is_nope_with_window and window is not None:
            layers = frozenset(range(fields["num_hidden_layers"]))
            nope = layers - (windows.layers if windows is not None else frozenset())
        biases = {
            name: bool_field(fields, name, name in family.default_biases)
            for name in family.optional_biases
        }
        stops = fields.get("eos_token_id", list(family.stop_tokens))
        if stops is None and not family.has_null_stops:
            stops = list(family.stop_tokens)
        intermediate = fields[family.intermediate]
        check_number(family.intermediate, intermediate, COUNT)
        max_positions = fields.get("max_position_embeddings", family.max_positions)
        source = fields if source_fields is None or split is not None else source_fields
        trained = trained_positions(source)
        if family.is_gemma and trained is None:  # its positions include RoPE's factor
            trained = int(max_positions / (rope.get("factor") or 1))
        is_grouped = bool_field(fields, GROUPED_QKV, False)
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        return cls(
            family=fields["model_type"],
            layers=fields["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=fields["vocab_size"],
            norm_eps=fields.get(family.norm_eps_field, family.norm_eps),
            max_positions=max_positions,
            tied=bool_field(fields, "tie_word_embeddings", family.tied),
            qkv_bias=family.qkv_bias or biases.get("attention_bias", False),
            o_bias=biases.get(family.o_bias, False),
            mlp_bias=biases.get("mlp_bias", False),
            dtype=None if name is None else _ALIASES.get(name, name),
            stop_tokens=token_ids(stops),
            rope=rope,
            rotary_dim=rotary_dim,
            trained_positions=trained,
            dense_positions=dense_positions(fields),
            window=limit,
            wrapper=fields.get(WRAPPER),
            kept_types=(),
            sliding_window=windows,
            windowed_rope=read_windowed_rope(
                fields, family, head_dim if windowed_heads is None else windowed_heads.dim
            ),
            windowed_heads=windowed_heads if windows is not None else None,
            has_shared_values=family.has_latents or (family.is_gemma4 and shares_keys(fields)),
            latent=latent,
            nope_layers=nope,
            qk_norm=family.qk_norm if _has_qk_norm(fields, family) else None,
            norms=family.norms,
            fused_qkv=family.fused_qkv or is_grouped,
            grouped_qkv=is_grouped,
            mlp_names=family.mlp,
            activation=family.activation,
            interleaved_rope=_interleaves(fields, family),
            query_scaling=query_scaling(rope) if family.has_query_scaling else None,
            experts=read_experts(fields, family),
            has_sinks=family.is_gpt_oss,
            is_gemma=family.is_gemma,
            float32_norms=family.is_gemma or family.has_offset_norms,
            offset_norms=(family.is_gemma and not family.is_gemma4) or family.has_offset_norms,
            is_gemma4=family.is_gemma4,
            is_cohere=family.is_cohere,
            recurrent=recurrent_shape(fields, family),
            split_layers=split,
            has_output_gates=family.has_delta_nets,
            has_predictor=family.has_delta_nets and predicts(fields),
            is_predictor=False,
            unused_layers=0 if family.has_split_layers else unused_layers(fields),
            **(multipliers(fields, head_dim) if family.has_multipliers else {}),
            **_gemma_numbers(fields, family, head_dim),
            **(minicpm_multipliers(fields) if family.is_minicpm else {}),
            **({} if latent is None else {"query_multiplier": latent_multiplier(latent, rope)}),
            **(cohere_multipliers(fields) if family.is_cohere else {}),
        )

    def with_rope_scaling(self, rope: str | None) -> ModelConfig:
        """Return this config with RoPE scaling, for sequences longer than the training context.

        `yarn:4` is YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.4) with factor 4, as
        transformers computes it: four times as many positions. None changes nothing. Raises
        ConfigError for an unknown scaling, and for a model that is already scaled.
        """
        if rope is None:
            return self
        factor = rope_factor(rope)
        if self.rope["rope_type"] == "yarn" and self.rope["factor"] == factor:
            return self
        if self.rope["rope_type"] != "default" or "frequency_factors" in self.rope:
            raise ConfigError(
                f"`rope` {rope}: the model already scales its positions, by RoPE type "
                f"{self.rope['rope_type']!r} or by frequency factors: it has {self.max_context}."
            )
        positions = int(self.max_positions * factor)
        if self.window is not None and self.window < positions:
            raise ConfigError(
                f"`rope` {rope} gives {positions} positions, but the model's attention sees at "
                f"most {self.window} tokens (sliding_window)."
            )
        scaled = {
            **self.rope,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.max_positions,
        }
        return replace(
            self, rope=scaled, trained_positions=self.max_positions, max_positions=positions
        )

    def check_context(self, tokens: int) -> None:
        """Raise ConfigError if a sequence of `tokens` tokens exceeds the model's positions."""
        limit = self.max_context
        if tokens <= limit:
            return
        factor, hint = ceil_div(tokens, limit), ""
        is_unscaled = self.rope["rope_type"] == "default" and "frequency_factors" not in self.rope
        if is_unscaled and factor <= MAX_ROPE_FACTOR and (self.window or inf) >= factor * limit:
            hint = f"; `rope` yarn:{factor} would extend them"
        raise ConfigError(f"`context` {tokens} is more than the model's {limit} positions{hint}.")

    @property
    def full_layers(self) -> int:
        """The number of layers with full attention, all others having a window or a state."""
        others = [self.sliding_window, self.recurrent]
        return self.layers - sum(len(each.layers) for each in others if each is not None)

    @property
    def max_context(self) -> int:
        """The number of tokens the model can address, limited by the attention window.

        Its positions, scaled if the config counts those of the training.
        """
        positions, _ = addressable_positions(self.rope, self.max_positions, self.trained_positions)
        return min(positions, self.window or positions)

    @property
    def context_limit(self) -> int:
        """The default context in tokens.

        Less than `max_context` if the model needs another kind of attention beyond it.
        """
        return min(self.max_context, self.dense_positions or self.max_context)

    def context_notes(self) -> list[str]:
        """Return notes for the user about the model's positions, one sentence each."""
        return context_notes(
            self.rope, self.max_positions, self.trained_positions, self.dense_positions
        )

    def inverse_frequencies(self, tokens: int, length: int | None = None) -> tuple[Tensor, float]:
        """Return the inverse frequencies (rotary_dim / 2,) float32, and the factor on cos and sin.

        Parameters as in `rotary`; `length` defaults to that of the prompt.
        """
        if self.rope["rope_type"] == "longrope" and length is not None:
            tokens = length
        return inverse_frequencies(self.rope, self.rotary_dim, self.max_positions, tokens)

    def rope_key(self, tokens: int, length: int) -> bytes:
        """Return a key that is equal for equal RoPE angles; parameters as in `rotary`."""
        frequencies, scale = self.inverse_frequencies(tokens, length)
        return frequencies.numpy().tobytes() + str(scale).encode()

    def rotary(self, tokens: int, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return the RoPE tables for positions up to `length`, for a prompt of `tokens` tokens.

        All keys of a sequence share one base, so whatever depends on the sequence's length is fixed
        before it starts. Dynamic NTK uses the prompt's length. LongRoPE uses `length`, the prompt
        with all tokens that may follow: if it exceeds the positions of the training, the long
        factors apply to the whole sequence. transformers switches in the middle of such a sequence,
        and prefills it again.
        """
        from offload.rotary import Rotary

        frequencies, scale = self.inverse_frequencies(tokens, length)
        if self.qk_norm == "rotated":
            scale = 1.0  # norms after the rotation would undo it
        rotary = Rotary(frequencies, scale, length, dtype, device, self.nope_layers)
        if self.windowed_rope is not None and self.sliding_window is not None:
            heads = self.windowed_heads
            dim = self.rotary_dim if heads is None else heads.dim
            own = inverse_frequencies(self.windowed_rope, dim, self.max_positions, tokens)
            rotary.rotate_windowed(*own, self.sliding_window.layers)
        if self.query_scaling is not None:
            rotary.scale_queries(*self.query_scaling)
        return rotary

    def kv_layout(self, ranks: int, dtype: torch.dtype, rank: int | None = None) -> KVLayout:
        """Return the KV layout of one of `ranks` ranks.

        By default that of the last rank, which holds at least as many heads as any other. Raises
        ConfigError if there are too few heads.
        """
        own = ranks - 1 if rank is None else rank
        if self.latent is not None:
            check_ranks(self.heads, ranks)
            groups = share_size(self.heads, own, ranks)
            return KVLayout(self.layers, 1, self.head_dim, dtype, groups, planes=1)
        check_ranks(self.kv_heads, ranks)
        heads = share_size(self.kv_heads, own, ranks)
        groups = self.heads // self.kv_heads
        windowed = self.windowed_heads
        if windowed is not None:
            check_ranks(windowed.heads, ranks)
            own = share_size(windowed.heads, ranks - 1 if rank is None else rank, ranks)
            windowed = windowed._replace(heads=own)
        recurrent = self.recurrent
        if recurrent is not None:
            check_ranks(split_heads(recurrent), ranks)
            recurrent = rank_shape(recurrent, ranks - 1 if rank is None else rank, ranks)
        window = self.sliding_window
        return KVLayout(
            self.layers, heads, self.head_dim, dtype, groups, window, windowed, recurrent
        )


def predictor_config(config: ModelConfig) -> ModelConfig:
    """Return the config of a model's multi-token-prediction block: one layer, with attention."""
    own = [(name, kind) for name, kind in config.kept_types if name.startswith(PREDICTION)]
    shared = [each for each in config.kept_types if each[0] in (EMBEDDING, HEAD)]
    experts = config.experts
    return replace(
        config,
        layers=1,
        recurrent=None,
        experts=None if experts is None else replace(experts, layers=frozenset({0})),
        kept_types=(*own, *shared),
        has_predictor=False,
        is_predictor=True,
    )


def _interleaves(fields: Mapping[str, Any], family: Family) -> bool:
    """Return whether RoPE rotates adjacent dimensions."""
    if not family.has_latents or not family.interleaved_rope:
        return family.interleaved_rope
    is_optional = fields["model_type"] != "deepseek_v2"
    return not is_optional or bool_field(fields, "rope_interleave", True)


def _has_qk_norm(fields: Mapping[str, Any], family: Family) -> bool:
    return family.qk_norm_field is None or bool_field(fields, family.qk_norm_field, False)


def _with_whole_layers(
    fields: Mapping[str, Any],
) -> tuple[Mapping[str, Any], SplitLayers | None]:
    """Return fields with layers that have a mixer and an MLP, and the parts if these are listed."""
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None or not family.has_split_layers:
        return fields, None
    layers = read_split_layers(fields)
    return with_whole_layers(fields, layers), layers


def _gemma_numbers(fields: Mapping[str, Any], family: Family, head_dim: int) -> dict[str, Any]:
    if family.is_gemma4:
        return gemma4_numbers(fields)
    return gemma_multipliers(fields, head_dim) if family.is_gemma else {}


def _read_config(path: Path, packed: bool, hub_name: str | None = None) -> ModelConfig:
    file = ConfigFile.read(path)
    config = _parse(path, file.fields)  # fails before headers are fetched
    if not packed:
        return config
    file = file.with_headers(hub_name)
    return _with_kept_types(_parse(path, file.fields), file.kept_types())


def _gguf_config(path: Path, header: GgufHeader, packed: bool) -> ModelConfig:
    fields = config_fields(header)
    config = _parse(path, fields)
    is_interleaved = config.interleaved_rope or family_of_file(header).interleaved_rope
    config = replace(config, interleaved_rope=is_interleaved)
    if config.recurrent is not None and family_of_file(header).has_tiled_heads:
        config = replace(config, recurrent=replace(config.recurrent, is_tiled=True))
    return _with_kept_types(config, kept_types(header, fields)) if packed else config


def _with_kept_types(config: ModelConfig, types: Mapping[str, KeptType]) -> ModelConfig:
    return replace(config, kept_types=tuple(types.items()))


def _parse(path: Path, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a file's fields. Raises ConfigError, which names the file."""
    try:
        return ModelConfig.from_fields(fields)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # any type, depending on the broken field
        raise ConfigError(f"{path} cannot be read: {one_line(error):.300}") from error
