"""Models with Mamba-2: broken configs, ranks that share a group, and packed weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.recurrent.selection import prompt_kernels
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import min_kv_heads
from parallel.config.weight_sizes import weight_sizes
from parallel.config_layers import SplitLayers
from parallel.errors import ConfigError
from parallel.model.loading import load_model, parameter_bytes
from parallel.ranks.process_group import TensorParallelGroup
from support.families import OTHERS
from support.loading import all_logits
from support.models import random_tokens
from support.quantised import fp8, quantise

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_n_groups": 3}, "8 value heads of linear attention do not divide into 3"),
        ({"mamba_d_conv": 1}, "mamba_d_conv = 1; it must be a whole number"),
        ({"mamba_d_state": 0}, "mamba_d_state = 0; it must be a whole number"),
        ({"mamba_expand": None}, "mamba_expand = None; it must be a whole number"),
        ({"mamba_d_head": 7}, "8 heads of mamba_d_head = 7, which have not 64 dimensions"),
        ({"layer_types": None}, "no layer with full attention"),
        ({"layer_types": ["mamba"] * 2}, "layer_types for 2 layers"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias = false (convolutions without biases)"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = true (biases of projections)"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit = [0.1, 1.0] (limits of step sizes)"),
        ({"num_local_experts": -1}, "num_local_experts = -1; it must be a whole number"),
    ],
)
def test_broken_configs_are_one_clear_line(
    checkpoint: Checkpoints, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    text = json.loads((checkpoint(**OTHERS["granite-mamba"]) / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**text, **fields}))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ModelConfig.from_name(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layers_block_type": ["mlp", "mamba", "attention"]},
            "layer 0 of the model's config is an",
        ),
        ({"layers_block_type": ["mamba", "moe", "mlp"]}, "layer 2 of the model's config is an MLP"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers of kind 'conv'"),
        ({"layers_block_type": ["mamba", "moe"]}, "no layer with full attention"),
        ({"layers_block_type": None}, "lacks layers_block_type"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M-*X"}, "layers of kind 'X'"),
        ({"n_groups": 4}, "6 value heads of linear attention do not divide into 4"),
        ({"use_bias": True, "mlp_bias": True}, "mlp_bias = true (biases of MLPs) and use_bias"),
        ({"moe_latent_size": 16}, "moe_latent_size = 16 (experts between projections)"),
        ({"mamba_hidden_act": "gelu"}, 'mamba_hidden_act = "gelu" (activations other than SiLU)'),
        ({"mlp_hidden_act": "silu"}, "activation 'silu' is not supported; models of type nemotron"),
        ({"n_routed_experts": None}, "n_routed_experts = None; it must be a whole number"),
    ],
)
def test_broken_configs_of_split_layers_are_one_clear_line(
    checkpoint: Checkpoints, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    text = json.loads((checkpoint(**OTHERS["nemotron_h"]) / "config.json").read_text())
    changed = {name: value for name, value in {**text, **fields}.items() if value is not None}
    if "n_routed_experts" in fields:
        changed |= fields
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ModelConfig.from_name(str(path))
    assert "\n" not in str(caught.value)


def test_a_pattern_of_letters_is_a_list_of_layers(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint(**OTHERS["nemotron_h"])
    text = json.loads((folder / "config.json").read_text())
    assert text.pop("layers_block_type")[:3] == ["linear_attention", "moe", "full_attention"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**text, "hybrid_override_pattern": "ME*-M"}))
    config = ModelConfig.from_name(str(path))
    assert config == ModelConfig.from_pretrained(folder)
    assert config.split_layers == SplitLayers((0, 2, 4), (1, 3, None), frozenset({0}))


def test_the_heads_of_a_single_group_are_split(checkpoint: Checkpoints) -> None:
    config = ModelConfig.from_pretrained(checkpoint(**OTHERS["granite-mamba"]))
    config = replace(config, heads=16, kv_heads=16)
    assert min_kv_heads(config) == 8
    shapes = [config.kv_layout(3, torch.float32, rank).recurrent for rank in range(3)]
    assert [(each.key_heads, each.value_heads) for each in shapes if each] == [
        (1, 2),
        (1, 3),
        (1, 3),
    ]
    grouped = ModelConfig.from_pretrained(checkpoint(**OTHERS["granite-experts"]))
    grouped = replace(grouped, heads=16, kv_heads=16)
    assert min_kv_heads(grouped) == 2
    with pytest.raises(ConfigError, match="2 key/value heads cannot be split over 3 ranks"):
        grouped.kv_layout(3, torch.float32)


def test_prompts_have_no_kernels(checkpoint: Checkpoints) -> None:
    layout = ModelConfig.from_pretrained(checkpoint(**OTHERS["granite-mamba"])).kv_layout(
        1, torch.bfloat16
    )
    assert layout.recurrent is not None
    found = prompt_kernels("cuda", torch.bfloat16, layout.recurrent)
    assert found == (None, "there are none for Mamba-2")


NAMES = ("in_proj", "out_proj", "q_proj", "o_proj", "input_linear", "output_linear")
NAMES += ("up_proj", "down_proj")


@pytest.mark.parametrize("name", ["granite-mamba", "granite-experts", "nemotron_h"])
def test_packed_layers_are_planned(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 64, "shared_intermediate_size": 64}
    if name == "nemotron_h":
        sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "mamba_num_heads": 8}
    folder = checkpoint(**OTHERS[name] | sizes)
    scheme = fp8((1, -1), torch.float32, "weight_scale", "row")
    path = tmp_path / "model"
    quantise(folder, path, {"quant_method": "fbgemm_fp8"}, scheme, NAMES)
    config, tokens = ModelConfig.from_pretrained(path, packed=True), random_tokens(60)
    assert config == ModelConfig.from_name(str(path), packed=True)
    mixer = "mixer" if name == "nemotron_h" else "mamba"
    assert f"model.layers.0.{mixer}.in_proj.weight" in {each for each, _ in config.kept_types}
    whole = load_model(path, TensorParallelGroup(), "float32")
    packed = load_model(path, TensorParallelGroup(), "float32", config)
    for ranks in (1, 2):
        for rank in range(ranks):
            own = load_model(path, TensorParallelGroup(rank, ranks), "bfloat16", config)
            planned = weight_sizes(config, ranks, 2, rank)
            assert parameter_bytes(own) == planned.nbytes + planned.scratch
    torch.testing.assert_close(all_logits(packed, tokens), all_logits(whole, tokens))
