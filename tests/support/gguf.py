"""Conversion of Hugging Face checkpoints to GGUF files of any type, as by llama.cpp's converter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    ExpertGatingFuncType,
    RopeScalingType,
)
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parallel.formats.weight_headers import PREDICTION
from support.models import OFFSET_NORMS

Kind = GGMLQuantizationType
# model types whose architecture has another name
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "ministral3": "mistral3",
    "granitemoehybrid": "granite",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
PREDICTION_PARTS = {  # parts of a multi-token-prediction block beside its layer
    "fc": MODEL_TENSOR.NEXTN_EH_PROJ,
    "pre_fc_norm_embedding": MODEL_TENSOR.NEXTN_ENORM,
    "pre_fc_norm_hidden": MODEL_TENSOR.NEXTN_HNORM,
    "norm": MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}
# their Q and K have interleaved heads
PERMUTED = ("arcee", "internlm2", "llama", "mistral3", "granite", "granitehybrid", "smollm3")
WITH_MAMBA = ("granitemoehybrid", "nemotron_h")
MULTIPLIERS = {
    "attention_multiplier": GGUFWriter.add_attention_scale,
    "embedding_multiplier": GGUFWriter.add_embedding_scale,
    "residual_multiplier": GGUFWriter.add_residual_scale,
    "logits_scaling": GGUFWriter.add_logit_scale,
}
# Types that gguf cannot quantise to: the offset of the scales in a block, which must not be random
# bytes, and the largest weight with a scale of 1
RANDOM = {
    Kind.Q2_K: (80, 15 * 3),
    Kind.Q3_K: (108, 32 * 4),
    Kind.Q4_K: (0, 63 * 31),
    Kind.Q5_K: (0, 63 * 31),
    Kind.Q6_K: (208, 128 * 32),
    Kind.IQ2_XXS: (0, 15.5 * 43 / 4),
    Kind.IQ2_XS: (0, 15.5 * 43 / 4),
    Kind.IQ2_S: (0, 15.5 * 43 / 4),
    Kind.IQ3_XXS: (0, 15.5 * 62 / 2),
    Kind.IQ3_S: (0, 31 * 15),
    Kind.IQ4_NL: (0, 127),
    Kind.IQ4_XS: (0, 32 * 127),
    Kind.NVFP4: (0, 12),
}


def blocks(weight: np.ndarray, kind: Kind, seed: int) -> np.ndarray:
    """Return the quantised bytes (rows, bytes) of a matrix; random ones for RANDOM types."""
    if kind not in RANDOM:
        return quantize(weight, kind).view(np.uint8).reshape(len(weight), -1)
    size, nbytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (len(weight), weight.shape[1] // size, nbytes), dtype=np.uint8)
    if kind == Kind.NVFP4:  # scales in 8 bits, of up to 0.03
        raw[..., :4] = generator.integers(8, 20, (*raw.shape[:2], 4))
        return raw.reshape(len(weight), -1)
    signs = generator.choice([-1, 1], (*raw.shape[:2], 1))
    scale_count = 2 if kind in (Kind.Q2_K, Kind.Q4_K, Kind.Q5_K) else 1
    offset, largest = RANDOM[kind]
    scale = (signs * 0.3 / largest * np.ones(scale_count)).astype(np.float16)
    raw[..., offset : offset + 2 * scale_count] = scale.view(np.uint8)
    return raw.reshape(len(weight), -1)


def interleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of Q or K permuted for llama.cpp's RoPE, as its converter does."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def deinterleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of Q or K in Hugging Face's order; the inverse of `interleave_heads`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def convert(
    folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    architecture: str | None = None,
    without: str = "",
    part_tensors: int = 0,
    **metadata: Any,
) -> Path:
    """Write the checkpoint in `folder` to `path`, with matrices of type `kind`.

    `metadata` adds fields, with two underscores for a dot; `without` names a tensor to leave out.
    With `part_tensors` it is a split model of parts with so many, and its first part is returned.
    """
    hf = AutoConfig.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    predictors = int(f"{PREDICTION}fc.weight" in stored)
    name = architecture or architecture_of(hf)
    writer = GGUFWriter(path, name, split_max_tensors=part_tensors)
    _describe(writer, hf, predictors)
    _add_rope(writer, hf)
    _add_windows(writer, hf)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder)
    for name, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](name.replace("__", "."), value)
    heads = {"attn_q": hf.num_attention_heads}
    if writer.arch in PERMUTED:
        heads["attn_k"] = hf.num_key_value_heads
    tensors = stacked_experts(with_last_layer(stored, hf.num_hidden_layers))
    tensors = with_split_mlps(hf, with_mamba(hf, tensors))
    tensors = as_converted(hf, with_split_latents(hf, with_split_experts(tensors)))
    names = name_map(writer.arch, hf.num_hidden_layers + predictors)
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        tensor_name = names(name)
        if tensor_name == without:
            continue
        weight = tensor.float().numpy()
        part = tensor_name.split(".")[-2]
        if hf.model_type in OFFSET_NORMS and "norm" in part and part != "ssm_norm":
            weight = weight + 1
        if part in heads and writer.arch in PERMUTED:
            weight = interleave_heads(weight, heads[part])
        is_plain = not tensor_name.endswith(".weight") or part in ("ssm_conv1d", "ssm_norm")
        if weight.ndim == 1 or kind == Kind.F32 or is_plain:
            writer.add_tensor(tensor_name, weight)
        else:
            raw = blocks(weight.reshape(-1, weight.shape[-1]), kind, seed)
            shape = (*weight.shape[:-1], raw.shape[-1])
            writer.add_tensor(tensor_name, raw.reshape(shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*")))) if part_tensors else path


def architecture_of(hf: Any) -> str:
    """Return the architecture of a model's files."""
    kinds = layer_kinds(hf)
    if hf.model_type == "granitemoehybrid" and "mamba" in kinds:
        return "granitehybrid"
    if hf.model_type == "nemotron_h" and "moe" in kinds:
        return "nemotron_h_moe"
    return ARCHITECTURES.get(hf.model_type, hf.model_type)


def layer_kinds(hf: Any) -> list[str]:
    """Return the kinds of layers of a model with Mamba-2, or of mixers and MLPs as layers."""
    if hf.model_type not in WITH_MAMBA:
        return []
    kinds = getattr(hf, "layers_block_type", None) or getattr(hf, "layer_types", None) or []
    return ["mamba" if kind == "linear_attention" else kind for kind in kinds]


def name_map(architecture: str, layers: int) -> Callable[[str], str]:
    """Return a function from Hugging Face names of tensors to llama.cpp's, as gguf has them."""
    known = {name: each for each, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(known[architecture], layers)

    def named(name: str) -> str:
        prefix, _, part = name.removesuffix(".weight").partition(f"{PREDICTION}parts.")
        if part:  # the library knows no such parts in these architectures
            layer = prefix.removeprefix("model.layers.").rstrip(".")
            return f"{TENSOR_NAMES[PREDICTION_PARTS[part]].format(bid=layer)}.weight"
        if name.endswith("router.scale"):
            return f"{names.get_name(name.replace('scale', 'proj'))}.scale"
        if name.endswith("router.per_expert_scale"):
            down = name.replace("router.per_expert_scale", "experts.down_proj")
            return f"{names.get_name(down)}.scale"
        if name.endswith(".A_log.weight"):
            return str(names.get_name(name.removesuffix(".weight")))
        name = name.replace("correction_bias", "correction.bias")
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    return named


def as_converted(hf: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with its gated delta nets as the converter has them."""
    if "linear_num_key_heads" not in hf.to_dict():
        return dict(tensors)
    keys, shared = hf.linear_num_key_heads, hf.linear_num_value_heads // hf.linear_num_key_heads
    own, dim = hf.linear_key_head_dim, hf.linear_value_head_dim

    def tiled(x: Tensor, size: int = 1, axis: int = 0) -> Tensor:
        if hf.model_type == "qwen3_next":
            return x
        heads = x.unflatten(axis, (keys, shared, size)).transpose(axis, axis + 1)
        return heads.flatten(axis, axis + 2).contiguous()

    def with_tiled_values(x: Tensor) -> Tensor:
        first, values = x.split([2 * keys * own, keys * shared * dim])
        return torch.cat((first, tiled(values, dim)))

    def separate(x: Tensor) -> dict[str, Tensor]:
        sizes = [own, own, shared * dim, shared * dim]
        heads = x.unflatten(0, (keys, sum(sizes))).split(sizes, dim=1)
        *qkv, z = (each.flatten(0, 1) for each in heads)
        return {"in_proj_qkv.weight": torch.cat(qkv), "in_proj_z.weight": z.contiguous()}

    rules: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
        "A_log": lambda x: {"A_log.weight": tiled(-x.exp())},
        "dt_bias": lambda x: {"dt_proj.bias": tiled(x)},
        "in_proj_qkv.weight": lambda x: {"in_proj_qkv.weight": with_tiled_values(x)},
        "conv1d.weight": lambda x: {"conv1d.weight": with_tiled_values(x.squeeze(1))},
        "in_proj_qkvz.weight": separate,
        "in_proj_z.weight": lambda x: {"in_proj_z.weight": tiled(x, dim)},
        "in_proj_a.weight": lambda x: {"in_proj_a.weight": tiled(x)},
        "in_proj_b.weight": lambda x: {"in_proj_b.weight": tiled(x)},
        "out_proj.weight": lambda x: {"out_proj.weight": tiled(x, dim, axis=1)},
        "shared_expert_gate.weight": lambda x: {"shared_expert_gate.weight": x.squeeze(0)},
    }
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        block = "linear_attn." if "linear_attn." in name else "mlp."
        prefix, found, part = name.rpartition(block)
        rule = rules.get(part) if found else None
        parts = {part: tensor} if rule is None else rule(tensor)
        converted |= {f"{prefix}{found}{own_name}": each for own_name, each in parts.items()}
    return converted


def with_last_layer(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, with a prediction block as another layer after the others."""
    moved, last = {}, f"model.layers.{layers}."
    for name, tensor in tensors.items():
        part = name.removeprefix(PREDICTION)
        if part.startswith("layers.0."):
            name = last + part.removeprefix("layers.0.")
        elif part != name:
            name = f"{last}{PREDICTION}parts.{part}"
        moved[name] = tensor
    return moved


def stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, with one of each layer for an expert's, as converters do."""
    stacked: dict[str, Any] = {}
    for name in sorted(tensors, key=_numbered):
        merged, index = re.subn(r"\.experts\.\d+\.", ".experts.", name)
        if index:
            stacked.setdefault(merged, []).append(tensors[name])
        else:
            stacked[name] = tensors[name]
    return {
        name: torch.stack(each) if isinstance(each, list) else each
        for name, each in stacked.items()
    }


def with_split_mlps(hf: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with Granite 4's MLPs as Granite's, as the converter does."""
    has_experts = getattr(hf, "num_local_experts", 0)
    blocks = {
        "shared_mlp.": "mlp.shared_experts." if has_experts else "mlp.",
        "block_sparse_moe.": "mlp.experts.",
    }
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        block = next((each for each in blocks if each in name), "")
        prefix, _, rest = name.partition(block) if block else (name, "", "")
        if rest == "input_linear.weight":
            gate, up = (each.contiguous() for each in tensor.chunk(2, dim=-2))
            split |= {f"{prefix}{blocks[block]}gate_proj.weight": gate}
            split |= {f"{prefix}{blocks[block]}up_proj.weight": up}
        elif rest == "output_linear.weight":
            split[f"{prefix}{blocks[block]}down_proj.weight"] = tensor
        else:
            split[name] = tensor
    return split


def with_mamba(hf: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with those of Mamba-2 as the converter has them."""
    groups = getattr(hf, "mamba_n_groups", getattr(hf, "n_groups", 1))
    rules: dict[str, Callable[[str, Tensor], tuple[str, Tensor]]] = {
        r"\.A_log$": lambda name, x: (name, -x.exp()[:, None]),
        r"\.D$": lambda name, x: (name, x[:, None]),
        r"\.dt_bias$": lambda name, x: (name.replace("dt_bias", "dt_proj.bias"), x),
        r"\.conv1d\.weight$": lambda name, x: (name, x.squeeze(1)),
        r"\.(mamba|mixer)\.norm\.weight$": lambda name, x: (name, x.view(groups, -1)),
        # those that are stacked
        r"\.mixer\.experts\.": lambda name, x: (name.replace("mixer", "mlp"), x),
    }
    if hf.model_type not in WITH_MAMBA:
        return dict(tensors)
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        rule = next((rule for part, rule in rules.items() if re.search(part, name)), None)
        own, changed = (name, tensor) if rule is None else rule(name, tensor)
        if ".mlp." in own:
            own = own.replace("backbone.layers", "model.layers")
        converted[own] = changed
    return converted


def with_split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with gpt-oss's stacks of experts as the converter has them."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?", name)
        if match is None:
            is_bare = name.endswith((".sinks", ".layer_scalar"))
            split[f"{name}.weight" if is_bare else name] = tensor
            continue
        prefix, part, is_bias = match.groups()
        if "mlp" not in prefix:  # Gemma 4's are as they are
            split[f"{name}.weight"] = tensor
            continue
        rows = tensor if is_bias else tensor.transpose(1, 2)
        kind = "bias" if is_bias else "weight"
        names = ("gate", "up") if part == "gate_up" else ("down",)
        for first, own in enumerate(names):
            split[f"{prefix}.{own}_proj.{kind}"] = rows[:, first :: len(names)].contiguous()
    return split


def with_split_latents(hf: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with projections of keys and values of latents apart."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, found, _ = name.partition("kv_b_proj")
        if not found:
            split[name] = tensor
            continue
        sizes = [hf.qk_nope_head_dim, hf.v_head_dim]
        keys, values = tensor.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        split[f"{prefix}k_b_proj.weight"] = keys.transpose(1, 2).contiguous()
        split[f"{prefix}v_b_proj.weight"] = values.contiguous()
    return split


def _numbered(name: str) -> list[str | int]:
    """Return a key that sorts names by the numbers in them."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _describe(writer: GGUFWriter, hf: Any, predictors: int) -> None:
    writer.add_name("a random model")
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_block_count(hf.num_hidden_layers + predictors)
    if predictors:
        writer.add_nextn_predict_layers(predictors)
    is_hybrid, has_mamba = hf.model_type == "granitemoehybrid", "mamba" in layer_kinds(hf)
    size = hf.shared_intermediate_size if is_hybrid else getattr(hf, "intermediate_size", None)
    if has_mamba:
        _describe_mamba(writer, hf)
    elif size is not None:
        writer.add_feed_forward_length(size)
    if "linear_num_key_heads" in hf.to_dict():
        writer.add_ssm_conv_kernel(hf.linear_conv_kernel_dim)
        writer.add_ssm_state_size(hf.linear_key_head_dim)
        writer.add_ssm_group_count(hf.linear_num_key_heads)
        writer.add_ssm_time_step_rank(hf.linear_num_value_heads)
        writer.add_ssm_inner_size(hf.linear_num_value_heads * hf.linear_value_head_dim)
        full = hf.layer_types.index("full_attention") + 1
        writer.add_full_attention_interval(full)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_head_count(hf.num_attention_heads)
    if is_hybrid and not has_mamba:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(256)
        writer.add_ssm_group_count(1)
        writer.add_ssm_inner_size(2 * hf.hidden_size)
        writer.add_ssm_time_step_rank(2)
        writer.add_expert_shared_feed_forward_length(hf.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(True)
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
    if hf.model_type.startswith("cohere"):
        writer.add_layer_norm_eps(hf.layer_norm_eps)
        writer.add_logit_scale(hf.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(getattr(hf, "rms_norm_eps", None) or hf.layer_norm_epsilon)
    writer.add_vocab_size(hf.vocab_size)
    if hf.model_type == "gemma4_text":
        _describe_gemma4(writer, hf)
    else:
        _describe_heads(writer, hf)
    _describe_experts(writer, hf)
    for name, add in MULTIPLIERS.items():
        if hasattr(hf, name):
            add(writer, getattr(hf, name))


def _describe_mamba(writer: GGUFWriter, hf: Any) -> None:
    """Add the dimensions of Mamba-2, and of MLPs, which in Nemotron-H are layers of their own."""
    kinds = layer_kinds(hf)
    if hf.model_type == "nemotron_h":
        writer.add_layer_norm_eps(hf.layer_norm_epsilon)
        writer.add_rope_dimension_count(hf.hidden_size // hf.num_attention_heads)
        writer.add_rope_scaling_finetuned(False)
        sizes = {"mlp": hf.intermediate_size, "moe": hf.moe_intermediate_size}
        writer.add_feed_forward_length([sizes.get(kind, 0) for kind in kinds])
        numbers = hf.conv_kernel, hf.ssm_state_size, hf.n_groups, hf.mamba_num_heads
        head_dim = hf.mamba_head_dim
    else:
        has_experts = bool(hf.num_local_experts)
        writer.add_feed_forward_length(
            hf.intermediate_size if has_experts else hf.shared_intermediate_size
        )
        writer.add_expert_shared_feed_forward_length(hf.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(hf.position_embedding_type == "rope")
        numbers = hf.mamba_d_conv, hf.mamba_d_state, hf.mamba_n_groups, hf.mamba_n_heads
        head_dim = hf.mamba_expand * hf.hidden_size // hf.mamba_n_heads
    kernel, state, groups, heads = numbers
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def _describe_experts(writer: GGUFWriter, hf: Any) -> None:
    if hf.model_type == "ernie4_5_moe":
        writer.add_expert_shared_count(hf.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(hf.intermediate_size)
        writer.add_interleave_moe_layer_step(hf.moe_layer_interval)
        writer.add_leading_dense_block_count(hf.moe_layer_start_index)
    if hf.model_type == "nemotron_h":
        if "moe" in layer_kinds(hf):
            _describe_nemotron_experts(writer, hf)
        return
    if hf.model_type in ("glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        is_sigmoid = hf.model_type != "deepseek_v2"
        kinds = ExpertGatingFuncType
        writer.add_expert_shared_count(hf.n_shared_experts)
        writer.add_leading_dense_block_count(getattr(hf, "first_k_dense_replace", 1))
        writer.add_expert_gating_func(kinds.SIGMOID if is_sigmoid else kinds.SOFTMAX)
        if hf.n_group is not None:
            writer.add_expert_group_count(hf.n_group)
            writer.add_expert_group_used_count(hf.topk_group)
        writer.add_expert_weights_scale(hf.routed_scaling_factor)
        writer.add_expert_weights_norm(hf.norm_topk_prob)
    if count := getattr(hf, "num_local_experts", None) or getattr(hf, "num_experts", None):
        writer.add_expert_count(count)
        per_token = "top_k_experts" if hf.model_type == "gemma4_text" else "num_experts_per_tok"
        writer.add_expert_used_count(getattr(hf, per_token))
    if hf.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(hf.intermediate_size)
    if size := getattr(hf, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(size)
    if size := getattr(hf, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(size)


def _describe_nemotron_experts(writer: GGUFWriter, hf: Any) -> None:
    writer.add_expert_count(hf.n_routed_experts)
    writer.add_expert_used_count(hf.num_experts_per_tok)
    writer.add_expert_feed_forward_length(hf.moe_intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_shared_feed_forward_length(hf.moe_shared_expert_intermediate_size)
    writer.add_expert_weights_norm(hf.norm_topk_prob)
    writer.add_expert_weights_scale(hf.routed_scaling_factor)
    writer.add_expert_group_count(hf.n_group)
    writer.add_expert_group_used_count(hf.topk_group)


def _describe_heads(writer: GGUFWriter, hf: Any) -> None:
    if "kv_lora_rank" in hf.to_dict():
        _describe_latents(writer, hf)
        return
    kv_heads = hf.num_key_value_heads
    if kinds := layer_kinds(hf):
        has_heads = [kind in ("attention", "full_attention") for kind in kinds]
        writer.add_head_count_kv([kv_heads * each for each in has_heads])
    else:
        writer.add_head_count_kv(kv_heads)
    if getattr(hf, "head_dim", None):
        writer.add_key_length(hf.head_dim)
        writer.add_value_length(hf.head_dim)
        if "linear_num_key_heads" in hf.to_dict():
            part = hf.rope_parameters["partial_rotary_factor"]
            writer.add_rope_dimension_count(int(hf.head_dim * part))
        elif "glm" not in hf.model_type:
            writer.add_rope_dimension_count(hf.head_dim)


def _describe_latents(writer: GGUFWriter, hf: Any) -> None:
    """Add the dimensions of latents, as of one KV head, and those of heads."""
    writer.add_head_count_kv(1)
    if hf.q_lora_rank is not None:
        writer.add_q_lora_rank(hf.q_lora_rank)
    writer.add_kv_lora_rank(hf.kv_lora_rank)
    writer.add_key_length(hf.kv_lora_rank + hf.qk_rope_head_dim)
    writer.add_value_length(hf.kv_lora_rank)
    writer.add_key_length_mla(hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    writer.add_value_length_mla(hf.v_head_dim)
    writer.add_rope_dimension_count(hf.qk_rope_head_dim)


def _describe_gemma4(writer: GGUFWriter, hf: Any) -> None:
    """Add the heads of each kind of layer, and which dimensions of full attention rotate."""
    layers = [hf.per_layer_config[layer] for layer in range(hf.num_hidden_layers)]
    full, windowed = (
        layers[hf.layer_types.index(kind)].head_dim
        for kind in ("full_attention", "sliding_attention")
    )
    writer.add_head_count_kv([each.num_key_value_heads for each in layers])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(windowed)
    writer.add_value_length_swa(windowed)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(windowed)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    if hf.final_logit_softcapping:
        writer.add_final_logit_softcapping(hf.final_logit_softcapping)
    part = hf.rope_parameters["full_attention"]["partial_rotary_factor"]
    rotated = int(full * part / 2)
    factors = np.array([1.0] * rotated + [1e30] * (full // 2 - rotated), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _add_rope(writer: GGUFWriter, hf: Any) -> None:
    """Add the RoPE parameters as the converter does: tensors of factors for llama3 and LongRoPE."""
    if hf.model_type == "nemotron_h":
        return
    rope = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    if alpha := rope.get("alpha"):
        scale = alpha ** (hf.head_dim / (hf.head_dim - 2))
        writer.add_rope_freq_base(rope["rope_theta"] * scale)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(hf.max_position_embeddings)
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    size = hf.hidden_size // hf.num_attention_heads
    if hf.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "kv_lora_rank" in hf.to_dict():
        if scale := rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    elif "glm" in hf.model_type:
        head_dim = getattr(hf, "head_dim", size)
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if hf.model_type == "phi3":
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(hf.original_max_position_embeddings)
        writer.add_sliding_window(hf.sliding_window or 0)
    _add_rope_factors(writer, hf, rope)


def _add_rope_factors(writer: GGUFWriter, hf: Any, rope: dict[str, Any]) -> None:
    """Add what scales the positions."""
    size = hf.to_dict().get("head_dim") or hf.hidden_size // hf.num_attention_heads
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    elif rope["rope_type"] == "longrope":
        original = hf.original_max_position_embeddings
        scale = hf.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    elif rope["rope_type"] not in ("default", "proportional"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def _add_windows(writer: GGUFWriter, hf: Any) -> None:
    """Add the sliding window, and which layers have one."""
    with_windows = ("cohere2", "exaone4", "gemma3_text", "gemma4_text", "gpt_oss", "olmo3")
    if hf.model_type not in with_windows or not hf.sliding_window:
        return
    writer.add_sliding_window(hf.sliding_window)
    if hf.model_type == "gpt_oss":
        return  # every second layer has none
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in hf.layer_types])
    if "sliding_attention" in hf.rope_parameters:
        writer.add_rope_freq_base_swa(hf.rope_parameters["sliding_attention"]["rope_theta"])


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """Write the byte-level BPE of a tokenizer.json."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    control = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted({**vocab, **control}, key={**vocab, **control}.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    hf = AutoConfig.from_pretrained(folder)
    writer.add_bos_token_id(hf.bos_token_id)
    writer.add_eos_token_id(hf.eos_token_id)
