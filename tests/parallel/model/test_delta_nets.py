"""Models with gated delta nets load as they are published: within larger ones, experts stacked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.config.model_config import ModelConfig
from parallel.errors import ConfigError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.families import OTHERS
from support.loading import all_logits
from support.models import edit_weights, random_tokens, reference_logits

Checkpoints = Callable[..., Path]


def as_published(tensors: dict[str, Tensor]) -> None:
    """Rename a text model's tensors, stack its experts, and add those of other parts."""
    experts: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda each: [int(n) for n in re.findall(r"\d+", each)]):
        if (match := re.fullmatch(r"(.+experts)\.\d+\.(\w+)_proj\.weight", name)) is not None:
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(tensors.pop(name))
    for name in [each for each in experts if each.endswith("down")]:
        prefix = name.removesuffix(".down")
        gate, up, down = (
            torch.stack(experts[f"{prefix}.{part}"]) for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{prefix}.down_proj"] = down
    for name in [each for each in tensors if each.startswith("model.")]:
        tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
    for name in ("model.visual.blocks.0.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"):
        tensors[name] = torch.ones(2, 2)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_text_models_of_larger_ones(checkpoint: Checkpoints, tmp_path: Path, kind: str) -> None:
    plain, tokens = checkpoint(**OTHERS[kind]), random_tokens(50)
    folder = edit_weights(shutil.copytree(plain, tmp_path / "larger"), as_published)
    text = json.loads((plain / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    whole = {"model_type": kind, "text_config": text, "vision_config": {"model_type": kind}}
    (folder / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_pretrained(folder)
    assert config == ModelConfig.from_name(str(folder))
    assert config.wrapper == kind
    assert config.rope == ModelConfig.from_pretrained(plain).rope
    path = tmp_path / "config.json"
    path.write_text(json.dumps(text))
    assert ModelConfig.from_name(str(path)).rope == config.rope
    logits = all_logits(load_model(folder, TensorParallelGroup(), "float32"), tokens)
    torch.testing.assert_close(logits, reference_logits(plain, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_value_heads": 5}, "5 value heads of linear attention do not divide into 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1; it must be a whole number"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim = 0; it must be a whole number"),
        ({"layer_types": ["linear_attention"] * 3}, "no layer with full attention"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types for 2 layers"),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            "layer_types with sliding_attention",
        ),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval = 0"),
        ({"num_experts": None}, "num_experts = None; it must be a whole number"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size = -1"),
    ],
)
def test_broken_configs_are_one_clear_line(
    checkpoint: Checkpoints, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    text = json.loads((checkpoint(**OTHERS["qwen3_5_moe"]) / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**text, **fields}))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ModelConfig.from_name(str(path))
    assert "\n" not in str(caught.value)
