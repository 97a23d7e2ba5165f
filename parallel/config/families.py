"""Table of model families: the meaning of each one's config, and the features none supports.

Everything is read from config.json's fields; neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from parallel.config.layer_heads import LATENT_FIELDS
from parallel.config.unsupported import unsupported_reason
from parallel.config_checks import (
    COUNT,
    COUNT_OR_NONE,
    MAX_EXPERTS,
    REAL,
    SCALE,
    Number,
    bool_field,
    check_fields,
    check_number,
    list_field,
    per_layer_field,
    quote,
)
from parallel.config_layers import LAYER_LISTS, has_sparse_layers, read_split_layers
from parallel.errors import ConfigError

Activation = Literal["silu", "gelu_pytorch_tanh", "relu2", "xielu"]
# MLPs with these have no gates: down(activation(up(x)))
UNGATED: tuple[Activation, ...] = ("relu2", "xielu")
PROPORTIONAL = "proportional"  # RoPE of Gemma 4
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# normalised per head, over all heads together, or per head after its rotation
QKNorm = Literal["head", "width", "rotated"]
# those with a sliding window: all, the upper ones, or all but every so many
WindowLayers = Literal["all", "upper", "pattern"]
# Experts are selected by probabilities, which are never normalised if it is greedy, by corrected
# probabilities, or by corrected sigmoids.
Routing = Literal["softmax", "greedy", "corrected", "sigmoid"]
BranchNorms = tuple[str | None, str | None]  # names of a branch's norms: before it, after it


class Norms(NamedTuple):
    """The norms of a layer's attention and of its MLP."""

    attention: BranchNorms = ("input_layernorm", None)
    mlp: BranchNorms = ("post_attention_layernorm", None)

    @property
    def total(self) -> int:
        """The number of a layer's norms."""
        return sum(name is not None for branch in self for name in branch)


class MlpNames(NamedTuple):
    """Names of the tensors of a dense MLP in the checkpoint."""

    block: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # or one name, of both stacked
    down: str = "down_proj"

    def inputs(self, prefix: str, stored: Container[str]) -> list[str]:
        """Return the names of gate and up in layer PREFIX, without ".weight".

        `stored`: names of tensors in the files; converted ones have apart what others stack.
        """
        own, apart = (
            [f"{prefix}.{self.block}.{name}" for name in names]
            for names in (self.gate_up, ("gate_proj", "up_proj"))
        )
        is_apart = len(own) == 1 and f"{apart[0]}.weight" in stored
        return apart if is_apart else own


PRE_NORMS, MLP, SHARED_EXPERT = Norms(), MlpNames(), MlpNames("mlp.shared_expert")
_UNGATED_MLP = MlpNames(gate_up=("up_proj",))


class Clamp(NamedTuple):
    """An activation clamped to a limit: gate * sigmoid(alpha * gate) * (up + 1).

    Source: OpenAI 2025, gpt-oss model card, arXiv 2508.10925, section 2.2.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertNames:
    """Names of a family's experts, in the config and in the checkpoint."""

    intermediate: str  # config field with the experts' intermediate size
    experts: str  # prefix of the experts' tensors within a layer
    router: str  # the router's
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: tuple[str, ...] = ("num_local_experts", "num_experts")  # config fields with the number
    per_token: str = "num_experts_per_tok"  # config field with the number of a token's experts
    shared: MlpNames = SHARED_EXPERT  # those of an expert of all tokens
    shared_gate: str | None = "mlp.shared_expert_gate"
    correction: str = ""  # tensor with the router's correction, if it has one
    correction_dims: tuple[int, ...] = ()  # its dimensions before that of the experts


class Gating(NamedTuple):
    """How a router's logits select a token's experts and weigh them.

    Source: Shazeer et al. 2017, arXiv 1701.06538, section 2.1; of all but `normalised`, DeepSeek-AI
    2024, DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """

    normalised: bool  # whether the weights of a token's experts sum to 1
    is_sigmoid: bool = False  # probabilities are each expert's own, not a softmax over all
    # Each expert has a number that is added for the selection, but not for the weights.
    is_corrected: bool = False
    groups: int = 1  # number of groups of consecutive experts
    groups_per_token: int = 1  # a token's experts are in its best groups, by their best two experts
    factor: float = 1.0  # weights are multiplied by it
    min_sum: float = 0.0  # weights with a smaller sum are divided by this
    in_float32: bool = False  # the router, in any model


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of a mixture of experts: number and size of the expert MLPs of a layer."""

    count: int
    per_token: int
    intermediate: int  # intermediate size of one expert
    gating: Gating
    layers: frozenset[int]  # layers with experts; the others have a dense MLP
    names: ExpertNames
    clamp: Clamp | None = None  # limits before the activation
    has_biases: bool = False  # experts and router
    # layers have an MLP beside their experts, and the router scales what it gets and returns, as in
    # Gemma 4
    is_gemma4: bool = False
    shared: int | None = None  # intermediate size of one more expert, of all tokens
    activation: Activation = "silu"

    @property
    def inputs(self) -> int:
        """Return the projections that an expert begins with: gate and up, or up alone."""
        return 1 if self.activation in UNGATED else 2

    def __post_init__(self) -> None:
        sizes = (self.count, self.per_token, self.intermediate)
        whole = all(isinstance(size, int) and size >= 1 for size in sizes)
        if not whole or self.per_token > self.count:
            raise ConfigError(
                f"the model's config gives {self.per_token!r} of {self.count!r} experts to a "
                f"token, with {self.intermediate!r} dimensions each: no valid mixture of experts."
            )


@dataclass(frozen=True)
class Family:
    """The defaults that transformers fills in for one model_type, and how it differs from Llama."""

    max_positions: int
    original_positions: int | None = None  # LongRoPE's training positions
    kv_heads: int | None = None  # None: as many as attention heads
    head_dim: int | None = None  # None: hidden size / attention heads
    norm_eps: float = 1e-6
    norm_eps_field: str = "rms_norm_eps"
    tied: bool = False
    stop_tokens: tuple[int, ...] = ()
    has_null_stops: bool = True  # a null eos_token_id means none, not the default
    rope_theta: float = 10_000.0
    rope_types: tuple[str, ...] = ROPE_TYPES
    rope_aliases: tuple[str, ...] = ()  # type names that mean LongRoPE in this family
    has_rope_alpha: bool = False  # with an alpha, dynamic RoPE is that of one larger base
    partial_rotary: float | None = None  # default part of a head that rotates; None: always all
    interleaved_rope: bool = False  # rotates adjacent dimensions, not the halves of a head
    sliding_window: int | None = None
    uses_sliding_window: bool | None = None  # default of a field for it; None: there is none
    window_layers: WindowLayers | None = None  # None: windows are not supported
    has_layer_types: bool = True  # false: transformers does not read the list
    window_pattern: int | None = None  # every how many layers one has no window
    has_pattern: bool = False  # whether a config may give it
    has_letters: bool = False  # whether it may be a string of L and G
    needs_window: bool = False  # without a window, transformers fails
    max_window_layers: int = 28  # default of the first layer with a window, if it is the upper ones
    is_nope_with_window: bool = False  # with any window, layers of full attention have no RoPE
    windowed_theta: float | None = None  # RoPE base of layers with a window, if they have their own
    intermediate: str = "intermediate_size"  # config field with the MLP's intermediate size
    qkv_bias: bool = False  # always present, not configurable
    optional_biases: tuple[str, ...] = ()  # config fields that enable a bias
    default_biases: tuple[str, ...] = ()  # those of them that are true by default
    o_bias: str = "attention_bias"  # the field for the bias of attention's output
    qk_norm: QKNorm | None = None
    norms: Norms = PRE_NORMS
    fused_qkv: bool = False  # one tensor for Q, K and V
    mlp: MlpNames = MLP
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    has_nope_layers: bool = False
    has_multipliers: bool = False  # Granite's
    has_offset_norms: bool = False  # norms are in float32, and stored less 1
    is_gemma: bool = False  # norms, activation and embedding of Gemma 3
    is_gemma4: bool = False
    ends_with_full: bool = False  # the last layer has full attention whatever the config says
    is_cohere: bool = False  # LayerNorm, MLPs parallel to attention, and logit scale of Cohere
    has_query_scaling: bool = False  # Llama 4's
    experts: ExpertNames | None = None
    is_gpt_oss: bool = False  # attention sinks, and experts with biases and a clamped activation
    shared_expert: str | None = None  # config field with its intermediate size
    shared_experts: str | None = None  # or that with their number: each has the size of the others
    routing: Routing = "softmax"
    qk_norm_field: str | None = None  # config field that enables `qk_norm`
    has_latents: bool = False  # multi-head latent attention
    is_minicpm: bool = False  # multipliers of MiniCPM
    has_delta_nets: bool = False  # in most layers; the others have gates of attention's outputs
    has_mamba: bool = False  # whether layers may have Mamba-2
    has_split_layers: bool = False  # the config lists mixers and MLPs as layers of their own

    @property
    def has_layer_kinds(self) -> bool:
        """Return whether layers with a window have another RoPE than those without."""
        return self.is_nope_with_window or self.windowed_theta is not None


_BIASES = ("attention_bias", "mlp_bias")
_POST_NORMS = Norms((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
_FUSED_MLP = MlpNames(gate_up=("gate_up_proj",))
_MISTRAL = Family(
    max_positions=131_072,
    kv_heads=8,
    sliding_window=4096,
    window_layers="all",
    stop_tokens=(2,),
)
_COHERE = Family(
    max_positions=8192,
    norm_eps=1e-5,
    norm_eps_field="layer_norm_eps",
    tied=True,
    stop_tokens=(255_001,),
    rope_theta=500_000.0,
    interleaved_rope=True,
    optional_biases=("attention_bias",),
    norms=Norms(("input_layernorm", None), ("input_layernorm", None)),
    is_cohere=True,
)
_OLMO2 = Family(
    max_positions=2048,
    norm_eps=1e-5,
    stop_tokens=(50_279,),
    optional_biases=("attention_bias",),
    qk_norm="width",
    norms=_POST_NORMS,
)
_GEMMA3 = Family(
    max_positions=131_072,
    kv_heads=4,
    head_dim=256,
    tied=True,
    stop_tokens=(1,),
    rope_theta=1_000_000.0,
    sliding_window=4096,
    needs_window=True,
    window_layers="pattern",
    window_pattern=6,
    has_pattern=True,
    windowed_theta=10_000.0,
    optional_biases=("attention_bias",),
    qk_norm="head",
    norms=Norms(
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    activation="gelu_pytorch_tanh",
    activation_field="hidden_activation",
    is_gemma=True,
)
_QWEN3_NEXT = Family(
    max_positions=32_768,
    kv_heads=2,
    head_dim=256,
    partial_rotary=0.25,
    optional_biases=("attention_bias",),
    uses_sliding_window=False,
    qk_norm="head",
    has_offset_norms=True,
    has_delta_nets=True,
    experts=ExpertNames("moe_intermediate_size", "mlp.experts", "mlp.gate"),
    shared_expert="shared_expert_intermediate_size",
)
_ERNIE = Family(
    max_positions=131_072,
    kv_heads=2,
    head_dim=128,
    norm_eps=1e-5,
    tied=True,
    stop_tokens=(2,),
    rope_theta=500_000.0,
    interleaved_rope=True,
)
_GRANITE4_MLP = MlpNames("shared_mlp", ("input_linear",), "output_linear")
_GLM = Family(
    max_positions=131_072,
    kv_heads=2,
    head_dim=128,
    norm_eps=1.5625e-7,
    stop_tokens=(151_329, 151_336, 151_338),
    has_null_stops=False,
    partial_rotary=0.5,
    interleaved_rope=True,
    optional_biases=("attention_bias",),
    default_biases=("attention_bias",),
    o_bias="",
    mlp=_FUSED_MLP,
)
_GLM4_MOE_EXPERTS = ExpertNames(
    "moe_intermediate_size",
    "mlp.experts",
    "mlp.gate",
    count=("n_routed_experts",),
    shared=MlpNames("mlp.shared_experts"),
    shared_gate=None,
    correction="mlp.gate.e_score_correction_bias",
)
_GLM4_MOE = Family(
    max_positions=131_072,
    kv_heads=8,
    norm_eps=1e-5,
    partial_rotary=0.5,
    optional_biases=("attention_bias",),
    o_bias="",
    qk_norm="head",
    qk_norm_field="use_qk_norm",
    experts=_GLM4_MOE_EXPERTS,
    shared_experts="n_shared_experts",
    routing="sigmoid",
)
_LATENT_MOE = replace(
    _GLM4_MOE,
    kv_heads=None,
    stop_tokens=(1,),
    partial_rotary=None,
    interleaved_rope=True,
    o_bias="attention_bias",
    qk_norm=None,
    qk_norm_field=None,
    has_latents=True,
)
FAMILIES = {
    "llama": Family(max_positions=2048, stop_tokens=(2,), optional_biases=_BIASES),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        rope_theta=10_000.0,
        sliding_window=4096,
        needs_window=True,
        window_layers="pattern",
        window_pattern=4,
        has_pattern=True,
        is_nope_with_window=True,
    ),
    "qwen2": Family(
        max_positions=32_768,
        kv_heads=32,
        qkv_bias=True,
        sliding_window=4096,
        uses_sliding_window=False,
        window_layers="upper",
    ),
    "qwen3": Family(
        max_positions=32_768,
        kv_heads=32,
        head_dim=128,
        optional_biases=("attention_bias",),
        qk_norm="head",
        sliding_window=4096,
        uses_sliding_window=False,
        window_layers="upper",
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(_QWEN3_NEXT, kv_heads=4, experts=None, shared_expert=None),
    "qwen3_5_moe_text": replace(_QWEN3_NEXT, intermediate="shared_expert_intermediate_size"),
    "smollm3": Family(
        max_positions=32_768,
        kv_heads=4,
        tied=True,
        stop_tokens=(128_001,),
        rope_theta=2_000_000.0,
        optional_biases=_BIASES,
        has_nope_layers=True,
        uses_sliding_window=False,
    ),
    "qwen3_moe": Family(
        max_positions=32_768,
        kv_heads=4,
        optional_biases=("attention_bias",),
        qk_norm="head",
        sliding_window=4096,
        uses_sliding_window=False,
        window_layers="all",
        has_layer_types=False,
        experts=ExpertNames("moe_intermediate_size", "mlp.experts", "mlp.gate"),
    ),
    "mixtral": Family(
        max_positions=131_072,
        kv_heads=8,
        norm_eps=1e-5,
        stop_tokens=(2,),
        rope_theta=1_000_000.0,
        window_layers="all",
        has_layer_types=False,
        experts=ExpertNames(
            "intermediate_size",
            "block_sparse_moe.experts",
            "block_sparse_moe.gate",
            gate="w1",
            up="w3",
            down="w2",
        ),
    ),
    "phi3": Family(
        max_positions=4096,
        original_positions=4096,
        norm_eps=1e-5,
        stop_tokens=(32_000,),
        rope_types=("default", "longrope"),
        rope_aliases=("su", "yarn"),
        partial_rotary=1.0,
        window_layers="all",
        has_layer_types=False,
        fused_qkv=True,
        mlp=_FUSED_MLP,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        rope_theta=500_000.0,
        sliding_window=4096,
        needs_window=True,
        window_layers="pattern",
        window_pattern=4,
        windowed_theta=500_000.0,
    ),
    "gemma3_text": _GEMMA3,
    "gemma4_text": replace(
        _GEMMA3,
        sliding_window=512,
        has_pattern=False,
        rope_types=(*ROPE_TYPES, PROPORTIONAL),
        experts=ExpertNames(
            "moe_intermediate_size", "experts", "router", per_token="top_k_experts"
        ),
        is_gemma4=True,
        ends_with_full=True,
    ),
    "exaone4": Family(
        max_positions=2048,
        kv_heads=32,
        norm_eps=1e-5,
        stop_tokens=(2,),
        sliding_window=4096,
        window_layers="pattern",
        window_pattern=4,
        has_pattern=True,
        has_letters=True,
        is_nope_with_window=True,
        qk_norm="head",
        norms=_POST_NORMS,
    ),
    "granite": Family(
        max_positions=2048, stop_tokens=(2,), optional_biases=_BIASES, has_multipliers=True
    ),
    "granitemoehybrid": Family(
        max_positions=2048,
        stop_tokens=(2,),
        intermediate="shared_intermediate_size",
        optional_biases=("attention_bias",),
        mlp=_GRANITE4_MLP,
        has_nope_layers=True,
        has_multipliers=True,
        has_mamba=True,
        experts=ExpertNames(
            "intermediate_size",
            "block_sparse_moe.experts",
            "block_sparse_moe.router.layer",
            shared=_GRANITE4_MLP,
            shared_gate=None,
        ),
        shared_expert="shared_intermediate_size",
    ),
    "nemotron_h": Family(
        max_positions=4096,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        norm_eps_field="layer_norm_epsilon",
        stop_tokens=(2,),
        norms=Norms(("norm", None), ("norm", None)),
        mlp=MlpNames("mixer", ("up_proj",)),
        activation="relu2",
        activation_field="mlp_hidden_act",
        has_nope_layers=True,
        has_mamba=True,
        has_split_layers=True,
        experts=ExpertNames(
            "moe_intermediate_size",
            "mixer.experts",
            "mixer.gate",
            count=("n_routed_experts",),
            shared=MlpNames("mixer.shared_experts", ("up_proj",)),
            shared_gate=None,
            correction="mixer.gate.e_score_correction_bias",
        ),
        shared_expert="moe_shared_expert_intermediate_size",
        routing="sigmoid",
    ),
    "ministral3": Family(
        max_positions=262_144,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        stop_tokens=(2,),
        has_query_scaling=True,
    ),
    "gpt_oss": Family(
        max_positions=131_072,
        kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150_000.0,
        sliding_window=128,
        needs_window=True,
        window_layers="pattern",
        window_pattern=2,
        optional_biases=("attention_bias",),
        default_biases=("attention_bias",),
        experts=ExpertNames("intermediate_size", "mlp.experts", "mlp.router"),
        is_gpt_oss=True,
    ),
    "seed_oss": Family(
        max_positions=524_288,
        kv_heads=8,
        head_dim=128,
        stop_tokens=(2,),
        optional_biases=("attention_bias", "attention_out_bias", "mlp_bias"),
        default_biases=("attention_bias",),
        o_bias="attention_out_bias",
    ),
    "arcee": Family(
        max_positions=4096,
        norm_eps=1e-5,
        stop_tokens=(128_001,),
        optional_biases=_BIASES,
        mlp=_UNGATED_MLP,
        activation="relu2",
    ),
    "apertus": Family(
        max_positions=65_536,
        norm_eps=1e-5,
        stop_tokens=(2,),
        rope_theta=12_000_000.0,
        optional_biases=("attention_bias",),
        qk_norm="head",
        norms=Norms(("attention_layernorm", None), ("feedforward_layernorm", None)),
        mlp=_UNGATED_MLP,
        activation="xielu",
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        kv_heads=4,
        head_dim=None,
        experts=ExpertNames(
            "moe_intermediate_size",
            "mlp.experts",
            "mlp.gate",
            count=("moe_num_experts",),
            per_token="moe_k",
            shared=MlpNames("mlp.shared_experts"),
            shared_gate=None,
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_dims=(1,),
        ),
        shared_experts="moe_num_shared_experts",
        routing="corrected",
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        norms=Norms(
            ("input_layernorm", "post_self_attn_layernorm"),
            ("post_attention_layernorm", "post_mlp_layernorm"),
        ),
    ),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": replace(_LATENT_MOE, max_positions=202_752),
    "deepseek_v3": replace(_LATENT_MOE, max_positions=4096, norm_eps=1e-6),
    "deepseek_v2": Family(
        max_positions=2048,
        stop_tokens=(2,),
        interleaved_rope=True,
        optional_biases=("attention_bias",),
        experts=replace(_GLM4_MOE_EXPERTS, correction=""),
        shared_experts="n_shared_experts",
        routing="greedy",
        has_latents=True,
    ),
    "minicpm3": Family(
        max_positions=32_768,
        norm_eps=1e-5,
        tied=True,
        stop_tokens=(2,),
        optional_biases=_BIASES,
        has_latents=True,
        is_minicpm=True,
    ),
    "hunyuan_v1_dense": Family(
        max_positions=2048,
        norm_eps=1e-5,
        stop_tokens=(2,),
        has_rope_alpha=True,
        optional_biases=("attention_bias",),
        qk_norm="rotated",
    ),
}

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def family_of(fields: Mapping[str, Any]) -> Family:
    """Return the family that a config.json's fields belong to.

    Raises ConfigError for a model with unsupported features, and names them.
    """
    kind = fields.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if (reason := unsupported_reason(fields, FAMILIES)) or family is None:
        raise ConfigError(str(reason))
    check_fields(fields)
    if kind == "mistral" and "layer_types" in fields:
        raise ConfigError(
            "layer_types in a mistral config is not supported: it indicates a Ministral model."
        )
    act = fields.get(family.activation_field, family.activation)
    if act != family.activation:
        raise ConfigError(
            f"activation {quote(act)} is not supported; models of type {kind} have "
            f"{family.activation}."
        )
    return family


def missing_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of required fields that a supported model's config.json lacks.

    transformers would fill in another model's values for them.
    """
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        return []
    required = list(_REQUIRED)
    if family.has_split_layers:  # their lists say how many there are
        required[required.index("num_hidden_layers")] = LAYER_LISTS[0]
        fields = {LAYER_LISTS[0]: None, **fields} if LAYER_LISTS[1] in fields else fields
    if family.experts is not None and _has_experts(fields, family):
        required += [family.experts.per_token, family.experts.intermediate]
        required += [] if expert_count(fields) is not None else [family.experts.count[-1]]
        shared = family.shared_expert, family.shared_experts
        required += [name for name in shared if name is not None]
    if family.has_latents:
        required += [*LATENT_FIELDS, "q_lora_rank"]
        required += [] if family.is_minicpm else ["v_head_dim"]
    required.append(family.intermediate)
    return [name for name in dict.fromkeys(required) if name not in fields]


def _has_experts(fields: Mapping[str, Any], family: Family) -> bool:
    """Return whether a config of a family with experts has any."""
    if family.has_split_layers:
        return has_sparse_layers(fields)
    if family.has_mamba:  # transformers has 8 by default
        return expert_count(fields) != 0
    return not family.is_gemma4 or bool_field(fields, "enable_moe_block", False)


def expert_count(fields: Mapping[str, Any]) -> Any:
    """Return the number of experts per layer, under whichever of its names the config uses."""
    return fields.get(_count_field(fields))


def _count_field(fields: Mapping[str, Any]) -> str:
    family = FAMILIES.get(fields.get("model_type", ""))
    if family is None or family.experts is None:
        return "num_experts"
    names = family.experts.count
    return next((name for name in names if name in fields), names[-1])


def read_experts(fields: Mapping[str, Any], family: Family) -> MoEConfig | None:
    """Return the mixture of experts of a config.json's fields; None if no layer has one.

    Raises ConfigError for invalid numbers.
    """
    names = family.experts
    if names is None or not _has_experts(fields, family):
        return None
    count = expert_count(fields)
    may_lack = family.shared_expert is None and family.shared_experts is None
    if count is None and not family.is_gemma4 and may_lack:
        return None
    if fields["model_type"] in ("qwen3_moe", "qwen3_next"):
        check_number(_count_field(fields), count, COUNT_OR_NONE)
        if not count:
            return None
    if not (sparse := _sparse_layers(fields)):
        return None
    check_number(_count_field(fields), count, Number(high=MAX_EXPERTS))
    for name in filter(None, (names.per_token, names.intermediate, family.shared_expert)):
        check_number(name, fields[name], COUNT)
    return MoEConfig(
        count=count,
        per_token=fields[names.per_token],
        intermediate=fields[names.intermediate],
        gating=_gating(fields, family, count),
        layers=sparse,
        names=names,
        activation=family.activation,
        clamp=_clamp(fields) if family.is_gpt_oss else None,
        has_biases=family.is_gpt_oss,
        is_gemma4=family.is_gemma4,
        shared=_shared_size(fields, family, names),
    )


# transformers' defaults: layers without experts; groups, those of a token, and factor of weights
_DENSE_LAYERS = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe": 1}
_ROUTING_DEFAULTS = {"deepseek_v3": (8, 4, 2.5), "glm4_moe_lite": (1, 1, 1.8)}


def _sparse_layers(fields: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers with experts. Raises ConfigError for invalid numbers."""
    layers, kind = range(fields["num_hidden_layers"]), fields["model_type"]
    if FAMILIES[kind].has_split_layers:
        return read_split_layers(fields).sparse
    if kind in ("qwen3_moe", "qwen3_next"):
        step = fields.get("decoder_sparse_step", 1)
        check_number("decoder_sparse_step", step, COUNT)
        dense = list_field(fields, "mlp_only_layers", int)
        return frozenset(each for each in layers if each not in dense and (each + 1) % step == 0)
    if kind == "ernie4_5_moe":
        ranges = {"start_index": COUNT_OR_NONE, "end_index": Number(low=-1), "interval": COUNT}
        defaults = {"start_index": 1, "end_index": -1, "interval": 1}
        first, last, step = (
            _number(fields, f"moe_layer_{name}", defaults[name], valid)
            for name, valid in ranges.items()
        )
        last = len(layers) - 1 if last == -1 else last
        return frozenset(each for each in layers if first <= each <= last and not (each + 1) % step)
    if kind in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        first = _number(fields, "first_k_dense_replace", _DENSE_LAYERS[kind], COUNT_OR_NONE)
        return frozenset(layers[first:])
    if kind == "glm4_moe_lite":
        kinds = per_layer_field(fields, "mlp_layer_types", str) or ["dense"]
        kinds += ["sparse"] * (len(layers) - len(kinds))
        return frozenset(each for each in layers if kinds[each] == "sparse")
    return frozenset(layers)


def _shared_size(fields: Mapping[str, Any], family: Family, names: ExpertNames) -> int | None:
    """Return the intermediate size of the expert that all tokens are sent to, or of all such."""
    if family.shared_expert is not None:
        size: int = fields[family.shared_expert]
        return size
    if family.shared_experts is None:
        return None
    count = fields[family.shared_experts]
    check_number(family.shared_experts, count, COUNT_OR_NONE)
    return count * fields[names.intermediate] or None


def _gating(fields: Mapping[str, Any], family: Family, experts: int) -> Gating:
    """Return how experts are selected. Raises ConfigError for invalid numbers."""
    if family.routing == "greedy":
        return _greedy_gating(fields)
    if family.routing == "corrected":
        floor = _number(fields, "moe_norm_min", 1e-12, Number(low=0, high=1, whole=False))
        return Gating(True, is_corrected=True, min_sum=floor, in_float32=True)
    if family.routing == "softmax":
        is_optional = fields["model_type"] in ("qwen3_moe", "qwen3_next")
        default = family.shared_expert is not None
        return Gating(not is_optional or bool_field(fields, "norm_topk_prob", default))
    defaults = _ROUTING_DEFAULTS.get(fields["model_type"], (1, 1, 1.0))
    groups = _number(fields, "n_group", defaults[0], COUNT)
    best = _number(fields, "topk_group", defaults[1], Number(high=groups))
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise ConfigError(
            f"the model's config gives n_group = {groups}: {experts} experts do not divide into so "
            "many groups of two or more."
        )
    per_token = fields[family.experts.per_token] if family.experts is not None else 0
    if per_token > experts // groups * best:
        raise ConfigError(
            f"the model's config gives topk_group = {best} of {groups} groups to a token, which "
            f"have fewer than its {per_token} experts."
        )
    return Gating(
        bool_field(fields, "norm_topk_prob", True),
        is_sigmoid=True,
        is_corrected=True,
        groups=groups,
        groups_per_token=best,
        factor=_number(fields, "routed_scaling_factor", defaults[2], SCALE),
        min_sum=1e-20,
        in_float32=True,
    )


def _greedy_gating(fields: Mapping[str, Any]) -> Gating:
    """Return DeepSeek-V2's gating; that of its largest model, by groups, is not supported."""
    method = fields.get("topk_method") or "greedy"
    if method != "greedy":
        raise ConfigError(
            f"the model's config gives topk_method = {quote(method)}, which is not supported: it "
            "must be greedy."
        )
    factor = _number(fields, "routed_scaling_factor", 1.0, SCALE)
    return Gating(False, factor=factor, in_float32=True)


def _number(fields: Mapping[str, Any], name: str, default: float, valid: Number) -> Any:
    """Return a config's number. Raises ConfigError if it is not valid."""
    value = fields.get(name, default)
    check_number(name, value, valid)
    return value


def _clamp(fields: Mapping[str, Any]) -> Clamp:
    """Return gpt-oss's activation. Raises ConfigError for invalid numbers."""
    clamp = Clamp(fields.get("swiglu_alpha", 1.702), fields.get("swiglu_limit", 7.0))
    for name, value in clamp._asdict().items():
        check_number(f"swiglu_{name}", value, SCALE)
    return clamp


def nope_layers(fields: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers without RoPE (NoPE) of a SmolLM3, Granite 4 or Nemotron-H config."""
    layers = range(fields["num_hidden_layers"])
    if fields["model_type"] == "nemotron_h":
        return frozenset(layers)
    if fields["model_type"] == "granitemoehybrid":
        kind = fields.get("position_embedding_type")
        if not isinstance(kind, str | None):
            raise ConfigError(
                f"the model's config gives position_embedding_type = {quote(kind)}; it must be "
                "rope, or another name or null for none."
            )
        return frozenset() if kind == "rope" else frozenset(layers)
    has_rope = per_layer_field(fields, "no_rope_layers", int)  # despite its name: 1 means RoPE
    if not has_rope:
        interval = fields.get("no_rope_layer_interval", 4)
        check_number("no_rope_layer_interval", interval, COUNT)
        has_rope = [(layer + 1) % interval for layer in layers]
    return frozenset(layer for layer in layers if not has_rope[layer])


def gemma_multipliers(fields: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Return Gemma's multipliers: query_pre_attn_scalar replaces the head dimension's scale."""
    scalar = fields.get("query_pre_attn_scalar", 256)
    check_number("query_pre_attn_scalar", scalar, COUNT)
    query = 1.0 if scalar == head_dim else (head_dim / scalar) ** 0.5
    return {"embedding_multiplier": fields["hidden_size"] ** 0.5, "query_multiplier": query}


def gemma4_numbers(fields: Mapping[str, Any]) -> dict[str, float | None]:
    """Return Gemma 4's multiplier of embeddings, and the cap of its logits."""
    cap = fields.get("final_logit_softcapping")
    if cap is not None:
        check_number("final_logit_softcapping", cap, SCALE)
    return {"embedding_multiplier": fields["hidden_size"] ** 0.5, "logits_cap": cap}


def minicpm_multipliers(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return MiniCPM's multipliers (transformers, modeling_minicpm3.py)."""
    layers, hidden = fields["num_hidden_layers"], fields["hidden_size"]
    numbers = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    numbers |= {name: fields[name] for name in numbers if name in fields}
    defaults = {"scale_depth": layers**0.5, "dim_model_base": hidden}  # transformers' for null
    for name, number in numbers.items():
        numbers[name] = defaults.get(name) if number is None else number
        check_number(name, numbers[name], SCALE)
    return {
        "embedding_multiplier": numbers["scale_emb"],
        "residual_multiplier": numbers["scale_depth"] / layers**0.5,
        "logits_scaling": hidden / numbers["dim_model_base"],
    }


def cohere_multipliers(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return Cohere's logit_scale, by its inverse."""
    scale = fields.get("logit_scale", 0.0625)
    check_number("logit_scale", scale, SCALE)
    return {"logits_scaling": 1 / scale}


def multipliers(fields: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Return Granite's multipliers. Its attention_multiplier replaces head_dim ** -0.5."""
    factors = {f"{part}_multiplier": 1.0 for part in ("embedding", "residual", "attention")}
    factors["logits_scaling"] = 1.0
    for name in factors:
        factors[name] = fields.get(name, 1.0)
        check_number(name, factors[name], REAL)
    query = factors.pop("attention_multiplier") * head_dim**0.5
    return {**factors, "query_multiplier": query}
