"""Names of tensors in safetensors files, of models whose files have others than Llama's.

Does not import torch, since a plan has to be fast.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name is the index of a layer
# Llama's modules by their names in the files of other models; {} is the index of a layer
_EXAONE = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h.{}.ln_1": "model.layers.{}.input_layernorm",
    "transformer.h.{}.ln_2": "model.layers.{}.post_attention_layernorm",
    "transformer.h.{}.attn.attention.q_proj": "model.layers.{}.self_attn.q_proj",
    "transformer.h.{}.attn.attention.k_proj": "model.layers.{}.self_attn.k_proj",
    "transformer.h.{}.attn.attention.v_proj": "model.layers.{}.self_attn.v_proj",
    "transformer.h.{}.attn.attention.out_proj": "model.layers.{}.self_attn.o_proj",
    "transformer.h.{}.mlp.c_fc_0": "model.layers.{}.mlp.gate_proj",
    "transformer.h.{}.mlp.c_fc_1": "model.layers.{}.mlp.up_proj",
    "transformer.h.{}.mlp.c_proj": "model.layers.{}.mlp.down_proj",
}
_INTERNLM2 = {
    "model.tok_embeddings": "model.embed_tokens",
    "output": "lm_head",
    "model.layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "model.layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "model.layers.{}.attention.wqkv": "model.layers.{}.self_attn.qkv_proj",
    "model.layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "model.layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "model.layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "model.layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
}
_HUNYUAN = {
    "model.layers.{}.self_attn.query_layernorm": "model.layers.{}.self_attn.q_norm",
    "model.layers.{}.self_attn.key_layernorm": "model.layers.{}.self_attn.k_norm",
}
_SCHEMES = (_EXAONE, _INTERNLM2, _HUNYUAN)


def own_name(stored: str) -> str:
    """Return the name of a tensor here: Llama's, or that in the file if it is not known."""
    names = (_renamed(stored, scheme) for scheme in _SCHEMES)
    return next((name for name in names if name is not None), stored)


def file_name(name: str, others: Collection[str]) -> str:
    """Return the name that a tensor of this name here has in files, or would have.

    `others`: names of tensors in the files.
    """
    for scheme in _SCHEMES:
        if any(_renamed(other, scheme) is not None for other in others):
            return _renamed(name, {own: stored for stored, own in scheme.items()}) or name
    return name


def _renamed(name: str, scheme: Mapping[str, str]) -> str | None:
    """Return a tensor's name with another name of its module; None if the scheme has none."""
    module, _, kind = name.rpartition(".")
    layer = _LAYER.search(module)
    if layer is None:
        return f"{scheme[module]}.{kind}" if module in scheme else None
    start, end = layer.span(1)
    renamed = scheme.get(f"{module[:start]}{{}}{module[end:]}")
    return None if renamed is None else f"{renamed.format(layer[1])}.{kind}"
