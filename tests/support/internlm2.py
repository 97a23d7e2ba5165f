"""InternLM2's files: those of a Llama with other names, and one tensor for Q, K and V."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.models import edit_weights

_MODULES = {
    "self_attn.qkv_proj": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def as_internlm2(llama: Path, folder: Path) -> Path:
    """Write a Llama of one file as InternLM2 is published, and return its folder.

    Source: convert2llama.py of github.com/InternLM/InternLM, in reverse.
    """
    shutil.copytree(llama, folder)
    path = folder / "config.json"
    fields: dict[str, Any] = json.loads(path.read_text())
    head_dim = fields.pop("head_dim")
    fields |= {"model_type": "internlm2", "bias": fields.pop("attention_bias")}
    fields["auto_map"] = {"AutoConfig": "configuration_internlm2.InternLM2Config"}
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(fields))
    edit_weights(folder, lambda tensors: _rename(tensors, head_dim))
    return folder


def _rename(tensors: dict[str, Tensor], head_dim: int) -> None:
    for query in [name for name in tensors if ".q_proj." in name]:
        names = [query.replace("q_proj", f"{part}_proj") for part in "qkv"]
        q, k, v = (tensors.pop(name).unflatten(0, (-1, head_dim)) for name in names)
        groups = q.unflatten(0, (len(k), -1))  # (KV heads, query heads of each, head_dim, ...)
        fused = torch.cat((groups, k[:, None], v[:, None]), dim=1)
        tensors[query.replace("q_proj", "qkv_proj")] = fused.flatten(0, 2)
    for name in list(tensors):
        renamed = name
        for module, own in _MODULES.items():
            renamed = renamed.replace(f"{module}.", f"{own}.")
        tensors[renamed] = tensors.pop(name)
