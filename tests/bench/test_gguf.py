"""A checkpoint as GGUF: every weight is there, in the dtype asked for, under the name that
llama.cpp knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file

from bench.peers.gguf import to_gguf
from parallel.config import ConfigError, ModelConfig
from support.models import rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_weights(
    checkpoint: Callable[..., Path], tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    folder, path = checkpoint(tie_word_embeddings=tied), tmp_path / "model.gguf"
    to_gguf(folder, path, dtype)
    config, reader = ModelConfig.from_pretrained(folder), GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == 9 * config.layers + 2 + (not tied)
    assert reader.fields["llama.attention.head_count_kv"].contents() == config.kv_heads
    assert reader.fields["llama.rope.freq_base"].contents() == pytest.approx(
        config.rope["rope_theta"]
    )
    weights = {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }

    def values(name: str) -> torch.Tensor:
        tensor = found[name]
        if tensor.tensor_type == GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).float()
        return torch.from_numpy(np.array(tensor.data))

    def same(name: str, weight: torch.Tensor) -> None:
        torch.testing.assert_close(
            values(name), weight.to(dtype if weight.ndim > 1 else torch.float32).float()
        )

    same("token_embd.weight", weights["model.embed_tokens.weight"])
    same("blk.1.ffn_down.weight", weights["model.layers.1.mlp.down_proj.weight"])
    same("blk.0.attn_norm.weight", weights["model.layers.0.input_layernorm.weight"])
    halves = weights["model.layers.2.self_attn.k_proj.weight"].unflatten(
        0, (config.kv_heads, 2, -1)
    )
    neighbours = values("blk.2.attn_k.weight").unflatten(0, (config.kv_heads, -1, 2))
    torch.testing.assert_close(neighbours[:, :, 1], halves[:, 1].to(dtype).float())


def test_what_is_not_converted_is_said(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for options in (
        {"family": "qwen2"},
        {"family": "qwen3"},
        {"rope_parameters": rope("linear", factor=4.0)},
    ):
        with pytest.raises(ConfigError, match="only llama and mistral with plain RoPE and without"):
            to_gguf(checkpoint(**options), tmp_path / "model.gguf", torch.float32)
