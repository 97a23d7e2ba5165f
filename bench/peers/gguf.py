"""A target as GGUF, for llama.cpp: the same weights in the same dtype.

There is no vocabulary in it, for llama.cpp is given token ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from parallel.config import ConfigError, ModelConfig

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def to_gguf(folder: Path, path: Path, dtype: torch.dtype) -> None:
    """Write `path` from the checkpoint in `folder`, in bfloat16 or float32.

    Raises ConfigError for what this does not convert.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    config = ModelConfig.from_pretrained(folder)
    rope = config.rope
    biased = config.qkv_bias or config.o_bias or config.mlp_bias
    plain = config.family in ("llama", "mistral") and rope["rope_type"] == "default"
    if biased or not plain:
        raise ConfigError(
            f"{folder}: only llama and mistral with plain RoPE and without biases are converted "
            "for llama.cpp."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    writer = GGUFWriter(unfinished, "llama")
    _describe(writer, config)
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if (known := _name(name)) is None or (known == "output.weight" and config.tied):
                continue
            kind = known.split(".")[-2]
            if kind in heads:
                tensor = _interleaved(tensor, heads[kind])
            if tensor.ndim == 1 or dtype == torch.float32:
                writer.add_tensor(known, tensor.float().numpy())
            else:
                half = tensor.to(torch.bfloat16).contiguous().view(torch.int16)
                raw = half.numpy().view(np.uint8)
                writer.add_tensor(known, raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)  # a file that was begun and not finished is none


def _describe(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("no_vocab")


def _name(name: str) -> str | None:
    """Return what GGUF calls a tensor of a checkpoint; None for what it has no use for."""
    if name in _OTHERS:
        return _OTHERS[name]
    if not name.startswith("model.layers."):
        return None
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    known = _LAYER.get(rest.removesuffix(".weight"))
    return f"blk.{index}.{known}.weight" if known else None


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows in the order of llama.cpp's RoPE.

    It turns neighbours, where Hugging Face's turns the two halves of a head.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
