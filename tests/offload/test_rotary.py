"""Rotary tables rotate keys and queries as transformers does, from any position on."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.phi3 import modeling_phi3

from parallel.config.model_config import ModelConfig
from support.links import CPU
from support.models import long_rope, rope, tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "yarn"])
@pytest.mark.parametrize("start", [0, 37])
def test_rotation_matches_transformers(dtype: torch.dtype, kind: str, start: int) -> None:
    factors = {"factor": 4.0, "original_max_position_embeddings": 64} if kind == "yarn" else {}
    hf = tiny_config(rope_parameters=rope(kind, **factors))
    q, k = torch.randn(20, 4, 8).to(dtype), torch.randn(20, 2, 8).to(dtype)
    cos, sin = LlamaRotaryEmbedding(hf)(q, torch.arange(start, start + 20)[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary = ModelConfig.from_hf(hf).rotary(57, 57, dtype, CPU)
    # addcmul rounds once where transformers rounds twice
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for x, reference in zip((q, k), expected, strict=True):
        torch.testing.assert_close(
            rotary.keys(x, start, 0), reference[0].transpose(0, 1), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("start", [0, 37])
def test_partial_rotation_matches_phi3(start: int) -> None:
    hf = tiny_config("phi3", rope_parameters=rope("default", partial_rotary_factor=0.5))
    q, k = torch.randn(20, 4, 8), torch.randn(20, 2, 8)
    cos, sin = modeling_phi3.Phi3RotaryEmbedding(hf)(q, torch.arange(start, start + 20)[None])
    expected = modeling_phi3.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    rotary = ModelConfig.from_hf(hf).rotary(57, 57, torch.float32, CPU)
    for x, reference in zip((q, k), expected, strict=True):
        rotated = rotary.keys(x, start, 0)
        torch.testing.assert_close(rotated, reference[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
        angles = rotary.angles(start, start + 20)
        assert torch.equal(rotary.apply(x, angles, 0), rotated)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@pytest.mark.parametrize("model", ["llama", "phi3", "smollm3", "ministral3", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_rotate_alike_together_and_alone(
    rows: int, model: str, dtype: torch.dtype
) -> None:
    partial = {"partial_rotary_factor": 0.5} if model == "phi3" else {}
    options = {"rope_parameters": rope("default", **partial)} if partial else {}
    config = ModelConfig.from_hf(tiny_config(model, **options))
    rotary = config.rotary(100, 100, dtype, CPU)
    assert (rotary.tables.cos.shape[-1] < config.head_dim) == (model == "phi3")
    q, k = torch.randn(rows, 4, config.head_dim), torch.randn(rows, 2, config.head_dim)
    q, k = q.to(dtype), k.to(dtype)
    for start in (5, 35):
        for layer in range(config.layers):
            together = rotary.queries_and_keys(q, k, start, layer)
            alone = rotary.queries(q, start, layer), rotary.keys(k, start, layer)
            for found, expected in zip(together, alone, strict=True):
                assert torch.equal(found, expected)


def test_angles_are_those_of_the_present_tables() -> None:
    rotary = ModelConfig.from_hf(tiny_config()).rotary(60, 60, torch.float32, CPU)
    before = rotary.angles(3, 7)
    assert rotary.angles(3, 7) is before
    rotary.scale_queries(0.3, 2)
    scale = rotary.angles(3, 7).query_scale
    assert scale is not None
    assert len(scale) == 4


def test_the_first_positions_do_not_keep_the_others_in_memory() -> None:
    rotary = ModelConfig.from_hf(tiny_config()).rotary(9_000, 9_000, torch.float32, CPU)
    rotary.keys(torch.randn(4, 2, 8), 5, 0)
    first = rotary.first(1)
    assert first.length == 1
    # a view is pickled with all of its memory
    assert len(pickle.dumps(first)) < 5_000 < 100_000 < len(pickle.dumps(rotary))


def test_longrope_factors_are_selected_by_the_maximum_length() -> None:
    hf = tiny_config("phi3", rope_parameters=long_rope(8), original_max_position_embeddings=32)
    config = ModelConfig.from_hf(hf)
    embedding = modeling_phi3.Phi3RotaryEmbedding(hf)
    for prompt, length in ((20, 32), (20, 33), (40, 50)):
        # transformers, in one forward over the whole sequence
        cos, _ = embedding(torch.ones(1), torch.arange(length)[None])
        rotary = config.rotary(prompt, length, torch.float32, CPU)
        torch.testing.assert_close(rotary.tables.cos[:, 0], cos[0], atol=1e-6, rtol=1e-6)


def test_nope_layers_are_not_rotated() -> None:
    rotary = ModelConfig.from_hf(tiny_config("smollm3")).rotary(9, 9, torch.float32, CPU)
    x = torch.randn(4, 2, 8)
    assert torch.equal(rotary.keys(x, 5, 1), x)
    for layer in (0, 2):
        assert not torch.equal(rotary.keys(x, 5, layer), x)


def test_legacy_rope_fields(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """rope_theta and rope_scaling, as in long-context checkpoints of 2023, are equivalent to
    rope_parameters.
    """
    current = ModelConfig.from_pretrained(
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
    fields |= {"rope_theta": 1e6, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    legacy = ModelConfig.from_pretrained(tmp_path)
    assert legacy.dtype == "bfloat16"
    frequencies, factor = legacy.inverse_frequencies(100)
    expected, expected_factor = current.inverse_frequencies(100)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor > 1


def test_queries_are_scaled_by_position_as_in_transformers() -> None:
    hf = tiny_config("ministral3")  # steps of 16 positions
    rotary = ModelConfig.from_hf(hf).rotary(60, 60, torch.float32, CPU)
    q = torch.randn(20, 4, 12)
    scale = modeling_ministral3.get_llama_4_attn_scale(torch.arange(30, 50)[None], 0.3, 16)
    assert len(scale.unique()) == 3
    expected = rotary.keys(q, 30, 0) * scale[0, 0, :, 0, None, None]
    torch.testing.assert_close(rotary.queries(q, 30, 0), expected, atol=1e-6, rtol=1e-6)
    first = rotary.first(50)
    assert torch.equal(first.queries(q, 30, 0), rotary.queries(q, 30, 0))
    with pytest.raises(ValueError, match="position 50 is past the rotary table"):
        first.queries(q, 31, 0)
    plain = ModelConfig.from_hf(tiny_config()).rotary(60, 60, torch.float32, CPU)
    assert torch.equal(plain.queries(q[..., :8], 30, 0), plain.keys(q[..., :8], 30, 0))


@pytest.mark.parametrize("rows", [3, 65])
def test_rotated_queries_are_multiplied_by_weights(rows: int) -> None:
    config = ModelConfig.from_hf(tiny_config())
    plain, weighted = (config.rotary(90, 90, torch.float32, CPU) for _ in range(2))
    weights = torch.randn(config.layers, config.head_dim)
    weighted.weight_queries(weights)
    q, k = torch.randn(rows, 4, config.head_dim), torch.randn(rows, 2, config.head_dim)
    for rotary in (weighted, weighted.first(80)):
        for layer in range(config.layers):
            rotated_q, rotated_k = rotary.queries_and_keys(q, k, 9, layer)
            assert torch.equal(rotated_q, plain.queries(q, 9, layer) * weights[layer])
            assert torch.equal(rotated_q, rotary.queries(q, 9, layer))
            assert torch.equal(rotated_k, plain.keys(k, 9, layer))


def test_positions_past_the_table_are_errors() -> None:
    rotary = ModelConfig.from_hf(tiny_config()).rotary(10, 10, torch.float32, CPU)
    assert rotary.length == 10
    rotary.keys(torch.randn(3, 2, 8), 7, 0)
    with pytest.raises(ValueError, match="position 10 is past the rotary table of 10 positions"):
        rotary.keys(torch.randn(3, 2, 8), 8, 0)
