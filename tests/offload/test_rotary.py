"""Rotary tables turn keys and queries as transformers does, from any position on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3

from parallel.config.model_config import ModelConfig
from support.links import CPU
from support.models import long_rope, rope, tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "yarn"])
@pytest.mark.parametrize("start", [0, 37])
def test_rotation_is_that_of_transformers(dtype: torch.dtype, kind: str, start: int) -> None:
    factors = {"factor": 4.0, "original_max_position_embeddings": 64} if kind == "yarn" else {}
    hf = tiny_config(rope_parameters=rope(kind, **factors))
    q, k = torch.randn(20, 4, 8).to(dtype), torch.randn(20, 2, 8).to(dtype)
    cos, sin = LlamaRotaryEmbedding(hf)(q, torch.arange(start, start + 20)[None])
    wanted = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary = ModelConfig.from_hf(hf).rotary(57, 57, dtype, CPU)
    # addcmul rounds once where transformers rounds twice
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for x, want in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(
            rotary(x, start, 0), want[0].transpose(0, 1), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("start", [0, 37])
def test_a_part_of_a_head_turns_as_in_phi3(start: int) -> None:
    hf = tiny_config("phi3", rope_parameters=rope("default", partial_rotary_factor=0.5))
    q, k = torch.randn(20, 4, 8), torch.randn(20, 2, 8)
    cos, sin = modeling_phi3.Phi3RotaryEmbedding(hf)(q, torch.arange(start, start + 20)[None])
    wanted = modeling_phi3.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    rotary = ModelConfig.from_hf(hf).rotary(57, 57, torch.float32, CPU)
    for x, want in zip((q, k), wanted, strict=True):
        turned = rotary(x, start, 0)
        torch.testing.assert_close(turned, want[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
        angles = rotary.at(torch.arange(start, start + 20))
        assert torch.equal(rotary.apply(x, angles, 0), turned)


def test_longrope_is_chosen_once_by_all_that_may_be_written() -> None:
    hf = tiny_config("phi3", rope_parameters=long_rope(8), original_max_position_embeddings=32)
    config = ModelConfig.from_hf(hf)
    embedding = modeling_phi3.Phi3RotaryEmbedding(hf)
    for prompt, length in ((20, 32), (20, 33), (40, 50)):
        # transformers, in one pass over all of it
        cos, _ = embedding(torch.ones(1), torch.arange(length)[None])
        rotary = config.rotary(prompt, length, torch.float32, CPU)
        torch.testing.assert_close(rotary.cos[:, 0], cos[0], atol=1e-6, rtol=1e-6)


def test_layers_without_rope_are_left_alone() -> None:
    rotary = ModelConfig.from_hf(tiny_config("smollm3")).rotary(9, 9, torch.float32, CPU)
    x = torch.randn(4, 2, 8)
    assert torch.equal(rotary(x, 5, 1), x)
    for layer in (0, 2):
        assert not torch.equal(rotary(x, 5, layer), x)


def test_configs_of_the_years_before(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """rope_theta and rope_scaling, as in the long-context checkpoints of 2023, mean what
    rope_parameters says today.
    """
    today = ModelConfig.from_pretrained(
        checkpoint(
            rope_parameters=rope("yarn", theta=1e6, factor=8.0, original_max_position_embeddings=64)
        )
    )
    fields = json.loads((checkpoint() / "config.json").read_text())
    del fields["rope_parameters"], fields["dtype"]
    scaling = {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "finetuned": True,
    }
    legacy = {"rope_theta": 1e6, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **legacy}))
    before = ModelConfig.from_pretrained(tmp_path)
    assert before.dtype == "bfloat16"
    (frequencies, factor), (wanted, wanted_factor) = (
        before.inverse_frequencies(100),
        today.inverse_frequencies(100),
    )
    assert torch.equal(frequencies, wanted)
    assert factor == wanted_factor > 1


def test_the_table_ends() -> None:
    rotary = ModelConfig.from_hf(tiny_config()).rotary(10, 10, torch.float32, CPU)
    assert rotary.length == 10
    rotary(torch.randn(3, 2, 8), 7, 0)
    with pytest.raises(ValueError, match="position 10 is past the rotary table of 10 positions"):
        rotary(torch.randn(3, 2, 8), 8, 0)
