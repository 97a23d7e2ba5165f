"""The architectures of GGUF files: their model types, and the Hugging Face names of tensors.

To add one, add a row to FAMILIES. Imports neither torch nor transformers. Source of the names:
github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py; of the rest: its folder `conversion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

from parallel.config_checks import quote
from parallel.errors import ConfigError
from parallel.formats.gguf import delta_nets, latents, mamba
from parallel.formats.gguf.header import GgufHeader, TensorInfo
from parallel.formats.gguf.tensors import TYPES

_NON_LAYER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_UNGATED_MLP = {part: name for part, name in _MLP.items() if part != "ffn_gate"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_EXPERTS_BESIDE = {  # with an expert of all tokens that has no gate
    "ffn_gate_inp": "mlp.gate",
    **_EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_FUSED_EXPERTS = {"ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")}
# parts of layers with gated delta nets, and of the others
_MIXERS = (
    *delta_nets.MIXER,
    *delta_nets.OLD_MIXER,
    *delta_nets.BETAS,
    *delta_nets.STACKED_BETAS,
    *_PROJECTIONS,
    *_QK_NORMS,
)
_ATTENTION = {**_PRE_NORMS, **_PROJECTIONS}
_LLAMA = {**_ATTENTION, **_MLP}
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_EXPERT_COUNTS = {"expert_used_count": "num_experts_per_tok"}
_ROUTED_FIELDS = {  # fields of GLM and DeepSeek
    "expert_count": "n_routed_experts",
    **_EXPERT_COUNTS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}


@dataclass(frozen=True)
class GgufFamily:
    """The properties of GGUF files of one architecture."""

    model_type: str
    # part of a layer: its name, with {} for the index of an expert, or several that it stacks; or a
    # whole tensor, such as attn_sinks.weight: its whole name
    tensors: Mapping[str, str | tuple[str, ...]]
    optional: tuple[str, ...] = ()  # parts that some layers lack
    # llama.cpp's RoPE rotates adjacent dimensions, Hugging Face's the halves of a head: the
    # converter has permuted the rows of Q and K accordingly
    interleaved_rope: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)  # further metadata: config field
    rope: Mapping[str, str] = field(default_factory=dict)  # further metadata: field of RoPE
    constants: Mapping[str, Any] = field(default_factory=dict)  # config fields unless it says so
    expected: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # only these values
    # parts that have a bias, in all layers or in none, each group of them on its own
    biases: tuple[tuple[str, ...], ...] = ()
    needs_biases: bool = False  # all of these are in all files
    stop_names: tuple[str, ...] = ()  # tokens that end an answer, whatever the metadata says
    has_windows: bool = False  # whether a sliding window means that of the model type
    has_delta_nets: bool = False
    has_latents: bool = False
    has_mamba: bool = False
    has_tiled_heads: bool = False  # value head i of a delta net has key head i modulo their number
    has_dense: bool = True  # whether its metadata has the size of a dense MLP
    ignored: tuple[str, ...] = ()  # prefixes of metadata without effect on the language model

    @property
    def expert_parts(self) -> list[str]:
        """The parts of experts, and of those of all tokens."""
        return [part for part in self.tensors if "exp" in part or part == "ffn_gate_inp"]

    def expert_count(self, fields: Mapping[str, Any]) -> int:
        """Return the number of experts of a layer that a config's fields say; 0 without any."""
        return int(fields.get(self.fields.get("expert_count", ""), 0))

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """Return a tensor's Hugging Face name, with {} if it stacks those of all experts.

        Several if it stacks these; none for a tensor the family does not have.
        """
        stem, _, kind = name.rpartition(".")
        if stem in _NON_LAYER and kind == "weight":
            return (f"{_NON_LAYER[stem]}.{kind}",)
        head, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        if head != "blk" or not index.isdecimal():
            return ()
        if (whole := self.tensors.get(f"{part}.{kind}".removeprefix("."))) is not None:
            return (f"model.layers.{index}.{whole}",)
        if kind != "weight" and (kind != "bias" or part not in chain(*self.biases)):
            return ()
        names = self.tensors.get(part, ())
        names = (names,) if isinstance(names, str) else names
        return tuple(f"model.layers.{index}.{each}.{kind}" for each in names)


def tensors_in(info: TensorInfo, names: Sequence[str]) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the names of what a tensor of these names holds: of itself, or of each expert's.

    Each with its location. Shapes are those that the metadata implies.
    """
    if "{}" not in names[0]:
        if len(info.shape) == 3:  # matrices of heads, which are one here
            info = replace(info, shape=(prod(info.shape[:2]), info.shape[2]))
        if names[0].endswith(mamba.VECTORS):
            info = replace(info, shape=(prod(info.shape),))
        yield names[0], info
        return
    experts, rows, *inner = info.shape
    shape, kind = (rows // len(names), *inner), TYPES[info.kind]
    nbytes = prod(shape) // kind.numbers * kind.nbytes
    parts = ((index, name) for index in range(experts) for name in names)
    for place, (index, name) in enumerate(parts):
        yield name.format(index), replace(info, shape=shape, start=info.start + place * nbytes)


_QKV = ("attn_q", "attn_k", "attn_v")
_MLP_BIASES = tuple(_MLP)
_LLAMA_FAMILY = GgufFamily(
    "llama", _LLAMA, interleaved_rope=True, biases=((*_QKV, "attn_output"), _MLP_BIASES)
)
_MIXTRAL = GgufFamily(
    "mixtral",
    {
        **_ATTENTION,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    interleaved_rope=True,
    fields={"expert_count": "num_local_experts", **_EXPERT_COUNTS},
)
_QWEN2 = GgufFamily("qwen2", _LLAMA, biases=(_QKV,))
_QWEN3 = GgufFamily("qwen3", {**_LLAMA, **_QK_NORMS}, biases=((*_QKV, "attn_output"),))
_QWEN3_MOE = GgufFamily(
    "qwen3_moe",
    {
        **_ATTENTION,
        **_QK_NORMS,
        "ffn_gate_inp": "mlp.gate",
        **_EXPERTS,
    },
    fields={
        "expert_count": "num_experts",
        **_EXPERT_COUNTS,
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    constants={"norm_topk_prob": True},
    biases=((*_QKV, "attn_output"),),
)
_OLMO3 = GgufFamily(
    "olmo3",
    {**_POST_NORMS, **_QK_NORMS, **_PROJECTIONS, **_MLP},
    fields={"rope.freq_base_swa": "rope_local_base_freq"},
    rope={"rope.scaling.attn_factor": "attention_factor"},
    biases=((*_QKV, "attn_output"),),
    has_windows=True,
)
_COHERE = GgufFamily(
    "cohere",
    {"attn_norm": "input_layernorm", **_PROJECTIONS, **_MLP},
    fields={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
    biases=(_QKV,),
)
_GEMMA4 = GgufFamily(
    "gemma4_text",
    {
        **_POST_NORMS,
        **_QK_NORMS,
        **_PROJECTIONS,
        **_MLP,
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "layer_output_scale.weight": "layer_scalar",
    },
    optional=("attn_v",),  # absent if keys are values
    fields={
        "attention.key_length_swa": "head_dim",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    constants={"hidden_size_per_layer_input": 0},
    has_windows=True,
)
_GEMMA4_EXPERTS = replace(
    _GEMMA4,
    tensors={
        **_GEMMA4.tensors,
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
        "ffn_down_exps": "experts.{}.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    fields={
        **_GEMMA4.fields,
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    constants={**_GEMMA4.constants, "enable_moe_block": True},
)
_DELTA_NETS = {**delta_nets.NORMS, **delta_nets.MIXER, **_PROJECTIONS, **_QK_NORMS}
_SHARED_EXPERT: dict[str, str | tuple[str, ...]] = {
    "ffn_gate_inp": "mlp.gate",
    **_EXPERTS,
    **_FUSED_EXPERTS,
    **delta_nets.SHARED_EXPERT,
}
_QWEN3_NEXT = GgufFamily(
    "qwen3_next",
    {**_DELTA_NETS, **delta_nets.OLD_MIXER, **delta_nets.STACKED_BETAS, **_SHARED_EXPERT},
    optional=(*_MIXERS, *_EXPERTS, *_FUSED_EXPERTS),
    fields={
        **delta_nets.FIELDS,
        "expert_count": "num_experts",
        **_EXPERT_COUNTS,
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    ignored=("rope.dimension_sections", "full_attention_interval", "attention.recurrent_layers"),
    has_delta_nets=True,
)
_GRANITE_SHARED = {"gate": "gate_proj", "up": "up_proj", "down": "output_linear"}
_GRANITE_HYBRID = replace(
    _LLAMA_FAMILY,
    model_type="granitemoehybrid",
    tensors={
        **_ATTENTION,
        **mamba.mixer("mamba"),
        **{f"ffn_{part}": f"shared_mlp.{name}" for part, name in _GRANITE_SHARED.items()},
    },
    optional=(*_PROJECTIONS, *mamba.mixer("")),
    fields={**MULTIPLIERS, **mamba.GRANITE_FIELDS},
    constants={"num_local_experts": 0, "position_embedding_type": True},
    biases=(),
    ignored=("expert_shared_feed_forward_length",),
    has_mamba=True,
)
_GRANITE_HYBRID_EXPERTS = replace(
    _GRANITE_HYBRID,
    tensors={
        **_ATTENTION,
        **mamba.mixer("mamba"),
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **{part: name.replace("mlp", "block_sparse_moe") for part, name in _EXPERTS.items()},
        **{f"ffn_{part}_shexp": f"shared_mlp.{name}" for part, name in _GRANITE_SHARED.items()},
    },
    fields={
        **_GRANITE_HYBRID.fields,
        "expert_count": "num_local_experts",
        **_EXPERT_COUNTS,
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    ignored=(),
)
_NEMOTRON_PROJECTIONS = {
    part: name.replace("self_attn", "mixer") for part, name in _PROJECTIONS.items()
}
_NEMOTRON_MLP = {part: name.replace("mlp", "mixer") for part, name in _UNGATED_MLP.items()}
_NEMOTRON_EXPERTS = {
    part: name.replace("mlp", "mixer")
    for part, name in _EXPERTS_BESIDE.items()
    if part not in ("ffn_gate_exps", "ffn_gate_shexp")
} | {latents.CORRECTION: "mixer.gate.e_score_correction_bias"}
_NEMOTRON_H = GgufFamily(
    "nemotron_h",
    {"attn_norm": "norm", **mamba.mixer("mixer"), **_NEMOTRON_PROJECTIONS, **_NEMOTRON_MLP},
    optional=(*mamba.mixer(""), *_NEMOTRON_PROJECTIONS, *_NEMOTRON_MLP),
    fields=mamba.NEMOTRON_FIELDS,
    ignored=("attention.layer_norm_epsilon",),  # beside that of RMS norms
    has_mamba=True,
)
_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
FAMILIES = {  # keyed by general.architecture; it is llama in files of Mistral and Mixtral
    "llama": _LLAMA_FAMILY,
    "mistral3": replace(  # Ministral 3, and Mistral-Small 3.1 and 3.2, which scale no queries
        _LLAMA_FAMILY,
        model_type="ministral3",
        rope={
            "attention.temperature_scale": "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
    ),
    "qwen2": _QWEN2,
    "qwen2vl": replace(_QWEN2, ignored=_IMAGES),
    "qwen3": _QWEN3,
    "qwen3vl": replace(_QWEN3, ignored=_IMAGES),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": replace(_QWEN3_MOE, ignored=_IMAGES),
    "qwen3next": _QWEN3_NEXT,
    "qwen35": replace(
        _QWEN3_NEXT,
        model_type="qwen3_5_text",
        tensors={**_DELTA_NETS, **delta_nets.BETAS, **_MLP},
        optional=_MIXERS,
        fields=delta_nets.FIELDS,
        has_tiled_heads=True,
    ),
    "qwen35moe": replace(
        _QWEN3_NEXT,
        model_type="qwen3_5_moe_text",
        tensors={**_DELTA_NETS, **delta_nets.BETAS, **_SHARED_EXPERT},
        has_tiled_heads=True,
        has_dense=False,
    ),
    "arcee": replace(
        _LLAMA_FAMILY,
        model_type="arcee",
        tensors={**_ATTENTION, **_UNGATED_MLP},
        biases=((*_QKV, "attn_output"), tuple(_UNGATED_MLP)),
    ),
    "exaone": replace(
        _LLAMA_FAMILY, interleaved_rope=False, ignored=("attention.layer_norm_epsilon",)
    ),
    "internlm2": _LLAMA_FAMILY,
    "hunyuan-dense": GgufFamily(
        "hunyuan_v1_dense",
        {**_LLAMA, **_QK_NORMS},
        biases=((*_QKV, "attn_output"),),
        ignored=("rope.scaling.original_context_length",),  # none are scaled
    ),
    "smollm3": replace(_LLAMA_FAMILY, model_type="smollm3"),  # every fourth layer has no RoPE
    "phi3": GgufFamily(
        "phi3",
        {
            **_PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        rope={"rope.scaling.attn_factor": "attention_factor"},
        has_windows=True,
    ),
    "olmo2": replace(_OLMO3, model_type="olmo2", fields={}, rope={}, has_windows=False),
    "exaone4": GgufFamily(
        "exaone4",
        {**_POST_NORMS, **_QK_NORMS, **_PROJECTIONS, **_MLP},
        constants={"sliding_window": None},
        has_windows=True,
    ),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, model_type="cohere2", has_windows=True),
    "gemma3": GgufFamily(
        "gemma3_text",
        {
            **_POST_NORMS,
            **_QK_NORMS,
            **_PROJECTIONS,
            **_MLP,
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
        },
        fields={"rope.freq_base_swa": "rope_local_base_freq"},
        has_windows=True,
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        {
            **_PROJECTIONS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            **_EXPERTS,
        },
        fields={
            "expert_count": "num_local_experts",
            **_EXPERT_COUNTS,
            "expert_feed_forward_length": "intermediate_size",
        },
        biases=((*_QKV, "attn_output", "ffn_gate_inp", *_EXPERTS),),
        expected={"attention.sliding_window_pattern": (2,)},  # other numbers
        needs_biases=True,
        # <|end|> ends a message of several
        stop_names=("<|return|>", "<|call|>", "<|endoftext|>"),
        has_windows=True,
    ),
    "gemma4": _GEMMA4,
    "seed_oss": GgufFamily(
        "seed_oss",
        {
            **_PROJECTIONS,
            **_MLP,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        biases=(_QKV, ("attn_output",), _MLP_BIASES),
    ),
    "ernie4_5": GgufFamily("ernie4_5", _LLAMA),
    "ernie4_5-moe": GgufFamily(
        "ernie4_5_moe",
        {
            **_LLAMA,
            **_EXPERTS_BESIDE,
            latents.CORRECTION: "mlp.moe_statics.e_score_correction_bias",
        },
        optional=(*_MLP, *_EXPERTS_BESIDE, latents.CORRECTION),
        fields={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        ignored=("expert_shared_feed_forward_length",),
    ),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            **_PROJECTIONS,
            **_QK_NORMS,
            **_MLP,
            **_EXPERTS_BESIDE,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            latents.CORRECTION: "mlp.gate.e_score_correction_bias",
        },
        optional=(*_QK_NORMS, *_MLP, *_EXPERTS_BESIDE, latents.CORRECTION),
        fields=_ROUTED_FIELDS,
        expected={"expert_gating_func": (2,)},  # sigmoid
        biases=(_QKV,),
    ),
    "deepseek2": GgufFamily(  # also GLM-4.7-Flash
        "deepseek_v2",
        {
            **_PRE_NORMS,
            **latents.PARTS,
            **_MLP,
            **_EXPERTS_BESIDE,
            **_FUSED_EXPERTS,
            latents.CORRECTION: "mlp.gate.e_score_correction_bias",
        },
        optional=(
            *latents.OPTIONAL,
            *_MLP,
            *_EXPERTS_BESIDE,
            *_FUSED_EXPERTS,
            latents.CORRECTION,
        ),
        fields={**latents.FIELDS, **_ROUTED_FIELDS},
        rope={"rope.scaling.yarn_log_multiplier": "mscale_all_dim"},
        constants=latents.CONSTANTS,
        has_latents=True,
    ),
    "glm4": GgufFamily(
        "glm4",
        {
            **_ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        biases=(_QKV,),
    ),
    "granite": replace(  # also Granite 4 without recurrent layers, whose files describe such layers
        _LLAMA_FAMILY,
        model_type="granite",
        ignored=("ssm.", "expert_shared_feed_forward_length"),
        expected={"rope.scaling.finetuned": (True,)},  # false: no RoPE
        fields=MULTIPLIERS,
    ),
    "granitehybrid": _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        tensors={**_NEMOTRON_H.tensors, **_NEMOTRON_EXPERTS},
        optional=(*_NEMOTRON_H.optional, *_NEMOTRON_EXPERTS),
        fields={
            **_NEMOTRON_H.fields,
            "expert_count": "n_routed_experts",
            **_EXPERT_COUNTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
        },
        expected={
            "expert_group_count": (0, 1),
            "expert_group_used_count": (0, 1),
            "expert_shared_count": (1,),
            "expert_gating_func": (2,),  # sigmoid
        },
        constants={"n_group": 1, "topk_group": 1},
    ),
}


def family_of(header: GgufHeader) -> GgufFamily:
    """Return the family of a file's architecture. Raises ConfigError if it is not supported."""
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        raise ConfigError(
            f"{header.path} is not a model: its general.type is "
            f"{quote(header.metadata['general.type'])}."
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"{header.path}: architecture {quote(name)} is not supported in GGUF files; "
            f"supported are {', '.join(FAMILIES)}."
        )
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if name == "granitehybrid" and header.metadata.get("granitehybrid.expert_count"):
        return _GRANITE_HYBRID_EXPERTS
    if name == "gemma4" and header.metadata.get("gemma4.expert_count"):
        return _GEMMA4_EXPERTS
    family = FAMILIES[name]
    if name == "olmo2" and header.metadata.get("olmo2.attention.sliding_window"):
        return _OLMO3
    return family
