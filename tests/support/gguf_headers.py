"""Headers of the GGUF files that people own: as published, but without the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

Tensors = dict[str, tuple[tuple[int, ...], Kind]]


@dataclass(frozen=True)
class Published:
    """A model in Q4_K_M, or as its publisher quantised it."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: tuple[int, int]  # query heads, and KV heads
    head_dim: int
    vocab: int
    context: int
    tensors: Callable[[Published, int], Tensors]  # those of a layer, without its index
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_tied: bool = False
    kind: Kind = Kind.Q4_K  # type of the embedding

    def write(self, path: Path) -> Path:
        """Write the file's header."""
        writer = GGUFWriter(path, self.architecture)
        fields = {
            "block_count": self.layers,
            "embedding_length": self.hidden,
            "feed_forward_length": self.intermediate,
            "attention.head_count": self.heads[0],
            "attention.head_count_kv": self.heads[1],
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "context_length": self.context,
            "rope.freq_base": 1e6,
            "vocab_size": self.vocab,
            **self.fields,
        }
        types = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
        types[bool] = GGUFValueType.BOOL
        for name, value in fields.items():
            kind = types.get(type(value), GGUFValueType.ARRAY)
            own = types[type(value[0])] if isinstance(value, list) else None
            writer.add_key_value(f"{self.architecture}.{name}", value, kind, own)
        whole: Tensors = {
            "token_embd": ((self.vocab, self.hidden), self.kind),
            "output_norm": ((self.hidden,), Kind.F32),
        }
        if not self.is_tied:
            kind = Kind.Q8_0 if self.hidden % 256 else Kind.Q6_K
            whole["output"] = ((self.vocab, self.hidden), kind)
        for layer in range(self.layers):
            own_tensors = self.tensors(self, layer)
            whole |= {f"blk.{layer}.{name}": each for name, each in own_tensors.items()}
        for name, (shape, kind) in whole.items():
            count, nbytes = GGML_QUANT_SIZES[kind]
            stored = (*shape[:-1], shape[-1] // count * nbytes)
            is_bare = name.endswith((".bias", "ssm_a", "ssm_d"))
            full_name = name if is_bare else f"{name}.weight"
            if kind == Kind.F32:
                dtype = np.dtype(np.float32)
                writer.add_tensor_info(full_name, shape, dtype, 4 * int(np.prod(shape)))
            else:
                size = int(np.prod(stored))
                writer.add_tensor_info(full_name, stored, np.dtype(np.uint8), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return path


def more_bits(model: Published, layer: int) -> Kind:
    """Return the type of values and of `down` in Q4_K_M: Q6_K in half of the layers."""
    eighth = model.layers // 8
    is_outer = layer < eighth or layer >= 7 * eighth
    return Kind.Q6_K if is_outer or (layer - eighth) % 3 == 2 else Kind.Q4_K


def attention(model: Published, layer: int, gates: int = 1) -> Tensors:
    queries, keys = (count * model.head_dim for count in model.heads)
    hidden = model.hidden
    return {
        "attn_norm": ((hidden,), Kind.F32),
        "attn_q": ((gates * queries, hidden), Kind.Q4_K),
        "attn_k": ((keys, hidden), Kind.Q4_K),
        "attn_v": ((keys, hidden), more_bits(model, layer)),
        "attn_output": ((hidden, queries), Kind.Q4_K),
    }


def mlp(model: Published, layer: int) -> Tensors:
    sizes = model.intermediate, model.hidden
    return {
        "ffn_gate": (sizes, Kind.Q4_K),
        "ffn_up": (sizes, Kind.Q4_K),
        "ffn_down": (sizes[::-1], more_bits(model, layer)),
    }


# 52 layers of Nemotron-3-Nano: Mamba-2, experts, attention
NEMOTRON = 5 * "MEMEM*E" + "MEMEMEM*EMEMEMEME"


def nemotron(model: Published, layer: int) -> Tensors:
    """Return the tensors of Nemotron-3-Nano, whose rows are no multiples of 256 weights."""
    kind, (hidden, width, experts) = NEMOTRON[layer], (model.hidden, 4096, 128)
    norm: Tensors = {"attn_norm": ((hidden,), Kind.F32)}
    more = Kind.Q8_0 if more_bits(model, layer) == Kind.Q6_K else Kind.Q5_0
    if kind == "*":
        kinds = {"attn_q": Kind.Q5_0, "attn_k": Kind.Q5_0, "attn_v": more}
        own = attention(model, layer)
        return {name: (shape, kinds.get(name, stored)) for name, (shape, stored) in own.items()}
    if kind == "E":
        return norm | {
            "ffn_gate_inp": ((experts, hidden), Kind.F32),
            "exp_probs_b.bias": ((experts,), Kind.F32),
            "ffn_up_exps": ((experts, model.intermediate, hidden), Kind.Q5_0),
            "ffn_down_exps": ((experts, hidden, model.intermediate), more),
            "ffn_up_shexp": ((3712, hidden), Kind.Q5_0),
            "ffn_down_shexp": ((hidden, 3712), more),
        }
    channels = width + 2 * 8 * 128
    return norm | {
        "ssm_in": ((width + channels + 64, hidden), Kind.Q5_0),
        "ssm_conv1d": ((channels, 4), Kind.F32),
        "ssm_conv1d.bias": ((channels,), Kind.F32),
        "ssm_dt.bias": ((64,), Kind.F32),
        "ssm_a": ((64, 1), Kind.F32),
        "ssm_d": ((64, 1), Kind.F32),
        "ssm_norm": ((8, width // 8), Kind.F32),
        "ssm_out": ((hidden, width), Kind.Q4_K),
    }


def norms(size: int, *names: str) -> Tensors:
    return dict.fromkeys(names, ((size,), Kind.F32))


def qwen3(model: Published, layer: int) -> Tensors:
    qk = norms(model.head_dim, "attn_q_norm", "attn_k_norm")
    return attention(model, layer) | mlp(model, layer) | qk | norms(model.hidden, "ffn_norm")


def seed_oss(model: Published, layer: int) -> Tensors:
    queries, keys = (count * model.head_dim for count in model.heads)
    biases = norms(queries, "attn_q.bias") | norms(keys, "attn_k.bias", "attn_v.bias")
    norm = norms(model.hidden, "post_attention_norm")
    return attention(model, layer) | mlp(model, layer) | biases | norm


def gemma3(model: Published, layer: int) -> Tensors:
    names = "ffn_norm", "post_attention_norm", "post_ffw_norm"
    qk = norms(model.head_dim, "attn_q_norm", "attn_k_norm")
    return attention(model, layer) | mlp(model, layer) | qk | norms(model.hidden, *names)


def gpt_oss(model: Published, layer: int) -> Tensors:
    experts, hidden, inner = 32, model.hidden, model.fields["expert_feed_forward_length"]
    queries, keys = (count * model.head_dim for count in model.heads)
    projections = {
        name: (shape, Kind.Q8_0 if len(shape) > 1 else kind)
        for name, (shape, kind) in attention(model, layer).items()
    }
    return {
        **projections,
        **norms(hidden, "post_attention_norm", "attn_output.bias"),
        **norms(queries, "attn_q.bias"),
        **norms(keys, "attn_k.bias", "attn_v.bias"),
        **norms(model.heads[0], "attn_sinks"),
        **norms(experts, "ffn_gate_inp.bias"),
        "ffn_gate_inp": ((experts, hidden), Kind.F32),
        "ffn_gate_exps": ((experts, inner, hidden), Kind.MXFP4),
        "ffn_up_exps": ((experts, inner, hidden), Kind.MXFP4),
        "ffn_down_exps": ((experts, hidden, inner), Kind.MXFP4),
        "ffn_gate_exps.bias": ((experts, inner), Kind.F32),
        "ffn_up_exps.bias": ((experts, inner), Kind.F32),
        "ffn_down_exps.bias": ((experts, hidden), Kind.F32),
    }


def qwen35(model: Published, layer: int) -> Tensors:
    """Three of four layers have a gated delta net, and the last is for multi-token prediction."""
    hidden, keys, heads, dim = model.hidden, 16 * 128, 48, 128
    common = mlp(model, layer) | norms(hidden, "attn_norm", "post_attention_norm")
    if (layer + 1) % 4 == 0 or layer == model.layers - 1:
        qk = norms(model.head_dim, "attn_q_norm", "attn_k_norm")
        full = common | attention(model, layer, gates=2) | qk
        if layer < model.layers - 1:
            return full
        parts = (f"nextn.{part}" for part in ("enorm", "hnorm", "shared_head_norm"))
        return full | norms(hidden, *parts) | {"nextn.eh_proj": ((hidden, 2 * hidden), Kind.Q8_0)}
    channels = 2 * keys + heads * dim
    return {
        **common,
        **norms(heads, "ssm_a", "ssm_dt.bias"),
        **norms(dim, "ssm_norm"),
        "attn_qkv": ((channels, hidden), Kind.Q4_K),
        "attn_gate": ((heads * dim, hidden), Kind.Q4_K),
        "ssm_conv1d": ((channels, 4), Kind.F32),
        "ssm_alpha": ((heads, hidden), Kind.Q8_0),
        "ssm_beta": ((heads, hidden), Kind.Q8_0),
        "ssm_out": ((hidden, heads * dim), Kind.Q5_K),
    }


def glm4_flash(model: Published, layer: int) -> Tensors:
    """Latent attention, and experts in all layers but the first (llama.cpp's deepseek2)."""
    hidden, heads, experts, inner = model.hidden, model.heads[0], 64, 1536
    tensors = {
        **norms(hidden, "attn_norm", "ffn_norm"),
        **norms(768, "attn_q_a_norm"),
        **norms(512, "attn_kv_a_norm"),
        "attn_q_a": ((768, hidden), Kind.Q4_K),
        "attn_q_b": ((heads * 256, 768), Kind.Q4_K),
        "attn_kv_a_mqa": ((576, hidden), Kind.Q8_0),
        "attn_k_b": ((heads, 512, 192), Kind.Q8_0),
        "attn_v_b": ((heads, 256, 512), Kind.Q8_0),
        "attn_output": ((hidden, heads * 256), Kind.Q4_K),
    }
    if not layer:
        return tensors | mlp(model, layer)
    return {
        **tensors,
        **norms(experts, "exp_probs_b.bias"),
        "ffn_gate_inp": ((experts, hidden), Kind.F32),
        "ffn_gate_exps": ((experts, inner, hidden), Kind.Q4_K),
        "ffn_up_exps": ((experts, inner, hidden), Kind.Q4_K),
        "ffn_down_exps": ((experts, hidden, inner), more_bits(model, layer)),
        "ffn_gate_shexp": ((inner, hidden), Kind.Q4_K),
        "ffn_up_shexp": ((inner, hidden), Kind.Q4_K),
        "ffn_down_shexp": ((hidden, inner), more_bits(model, layer)),
    }


PUBLISHED = {
    "Qwen3.8-27B": Published(
        *("qwen35", 65, 5120, 17_408, (24, 4), 256, 248_320, 262_144, qwen35),
        {
            "full_attention_interval": 4,
            "nextn_predict_layers": 1,
            "rope.dimension_count": 64,
            "ssm.conv_kernel": 4,
            "ssm.group_count": 16,
            "ssm.inner_size": 6144,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 48,
        },
    ),
    "Gemma-3-27B": Published(
        *("gemma3", 62, 5376, 21_504, (32, 16), 128, 262_208, 131_072, gemma3),
        {
            "attention.sliding_window": 1024,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        is_tied=True,
        kind=Kind.Q6_K,
    ),
    "gpt-oss-20b": Published(
        *("gpt-oss", 24, 2880, 2880, (64, 8), 64, 201_088, 131_072, gpt_oss),
        {
            "attention.sliding_window": 128,
            "expert_count": 32,
            "expert_feed_forward_length": 2880,
            "expert_used_count": 4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        kind=Kind.Q8_0,
    ),
    "GLM-4.7-Flash": Published(
        *("deepseek2", 47, 2048, 10_240, (20, 1), 576, 154_880, 202_752, glm4_flash),
        {
            "attention.kv_lora_rank": 512,
            "attention.key_length_mla": 256,
            "attention.q_lora_rank": 768,
            "attention.value_length": 512,
            "attention.value_length_mla": 256,
            "expert_count": 64,
            "expert_feed_forward_length": 1536,
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_shared_count": 1,
            "expert_used_count": 4,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.8,
            "leading_dense_block_count": 1,
            "rope.dimension_count": 64,
        },
    ),
    "Nemotron-3-Nano": Published(
        *("nemotron_h_moe", 52, 2688, 1856, (32, 2), 128, 131_072, 1 << 20, nemotron),
        {
            "attention.head_count_kv": [2 * (kind == "*") for kind in NEMOTRON],
            "expert_count": 128,
            "expert_feed_forward_length": 1856,
            "attention.layer_norm_epsilon": 1e-5,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 3712,
            "expert_used_count": 6,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "feed_forward_length": [1856 * (kind == "E") for kind in NEMOTRON],
            "rope.dimension_count": 84,
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": 4,
            "ssm.group_count": 8,
            "ssm.inner_size": 4096,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 64,
        },
        kind=Kind.Q5_0,
    ),
    "Qwen3-32B": Published(*("qwen3", 64, 5120, 25_600, (64, 8), 128, 151_936, 40_960, qwen3)),
    "Seed-OSS-36B": Published(
        *("seed_oss", 64, 5120, 27_648, (80, 8), 128, 155_136, 524_288, seed_oss)
    ),
}
