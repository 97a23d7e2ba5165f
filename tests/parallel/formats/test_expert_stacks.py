"""Experts in stacks, as gpt-oss has them: in numbers and in MXFP4, packed or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from parallel.config.model_config import ModelConfig
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.expert_headers import expert_headers
from parallel.formats.weight_headers import TensorHeader
from parallel.model.loading import load_model, parameter_bytes
from parallel.model.moe import SparseMoE
from parallel.ranks.process_group import TensorParallelGroup
from support.loading import all_logits
from support.models import edit_weights, random_tokens, reference_logits
from support.ranks import run_ranks
from support.slow import slow_except

Checkpoints = Callable[..., Path]
# two ranks split the groups of `down`, of which a row has four
SIZES: dict[str, Any] = {
    "family": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_local_experts": 5,
    "dtype": torch.bfloat16,
}
BLOCK = "model.layers.0.mlp.experts"
EXPERT = f"{BLOCK}.3"


def quantise(tensors: dict[str, Tensor]) -> None:
    """Replace stacks of experts by random MXFP4 ones."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}


def quantised(
    folder: Path,
    copy: Path,
    edit: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    **fields: Any,
) -> Path:
    """Return a quantised copy of a checkpoint, after `edit` of its tensors."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, **fields}
    (copy / "config.json").write_text(json.dumps(config))

    def edit_all(tensors: dict[str, Tensor]) -> None:
        quantise(tensors)
        edit(tensors)

    return edit_weights(copy, edit_all)


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A tiny gpt-oss with experts in MXFP4."""
    return quantised(checkpoint(**SIZES), tmp_path / "mxfp4")


@pytest.mark.parametrize("packed", [True, False])
def test_weights_are_those_of_transformers(folder: Path, packed: bool) -> None:
    config = ModelConfig.from_pretrained(folder, packed=packed)
    model = load_model(folder, TensorParallelGroup(), "bfloat16", config)
    own = model.layers[0].mlp
    assert isinstance(own, SparseMoE)
    assert (own.experts.gate_up.packed is not None) == packed
    assert (own.experts.down.packed is not None) == packed
    tensors = load_file(folder / "model.safetensors")
    for part, matrix in (("gate_up_proj", own.experts.gate_up), ("down_proj", own.experts.down)):
        blocks, scales = (tensors[f"{BLOCK}.{part}_{each}"] for each in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)  # (E, rows, columns)
        for expert in range(5):
            rows = expected[expert]
            if part == "gate_up_proj":
                rows = torch.cat((rows[::2], rows[1::2]))
            assert torch.equal(matrix.of(expert), rows)


def logits_on_rank(folder: Path, packed: bool) -> Tensor:
    config = ModelConfig.from_pretrained(folder, packed=packed)
    group = TensorParallelGroup.from_environment("cpu")
    model = load_model(folder, group, "float32", config)
    assert parameter_bytes(model) == weight_sizes(config, group.size, 4, group.rank).nbytes
    return all_logits(model, random_tokens(60))


@pytest.mark.parametrize("ranks", slow_except([1, 2]))
def test_logits_are_those_of_the_same_weights_in_numbers(
    folder: Path, tmp_path: Path, ranks: int
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path / "plain")
    expected = reference_logits(tmp_path / "plain", random_tokens(60))
    for packed in (True, False):
        if ranks == 1:
            outs = [logits_on_rank(folder, packed)]
        else:
            outs = run_ranks(2, logits_on_rank, folder, packed)
        for out in outs:
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_a_plan_counts_packed_experts(folder: Path) -> None:
    config = ModelConfig.from_name(str(folder), packed=True)
    assert config == ModelConfig.from_pretrained(folder, packed=True)
    assert {name for name, _ in config.kept_types} == {
        f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj.weight"
        for layer in range(2)
        for part in ("gate", "up", "down")
    }
    for ranks in (1, 2):
        sizes = weight_sizes(config, ranks, 2)
        experts = 2 * 5 * 3 * 64 * 128 // ranks
        assert sizes.kept_experts == experts
        assert sizes.experts == experts * 17 // 32


def replace(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(f"{BLOCK}.down_proj_scales"), "has no scales"),
        (lambda tensors: tensors.pop(f"{BLOCK}.down_proj_blocks"), "has no codes"),
        (
            replace(f"{BLOCK}.gate_up_proj_scales", lambda scales: scales[:, 1:]),
            r"_blocks has shape \(5, 256, 2, 16\) for scales of shape \(5, 255, 2\)",
        ),
        (replace(f"{BLOCK}.gate_up_proj_bias", lambda bias: bias[0]), "no stack of experts"),
        (replace(f"{BLOCK}.gate_up_proj_bias", lambda bias: bias[:, 1:]), "255 rows for two"),
        (
            replace(f"{BLOCK}.gate_up_proj_blocks", lambda blocks: blocks.to(torch.int8)),
            "is I8 instead of U8",
        ),
        (replace(f"{BLOCK}.down_proj_bias", lambda bias: bias.to(torch.uint8)), "is U8"),
        (replace(f"{BLOCK}.down_proj_bias", lambda bias: bias[:3]), "3.down_proj.bias is missing"),
        (lambda tensors: tensors.pop(f"{BLOCK}.gate_up_proj_bias"), "no scales beside it"),
        (lambda tensors: tensors.pop("model.layers.1.self_attn.sinks"), "sinks is missing"),
        (replace(f"{BLOCK}.gate_up_proj_scales", lambda each: each | 255), "not finite"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_broken_stacks_are_named(
    checkpoint: Checkpoints,
    tmp_path: Path,
    edit: Callable[[dict[str, Tensor]], Any],
    words: str,
    packed: bool,
) -> None:
    folder = quantised(checkpoint(**SIZES), tmp_path / "broken", edit)

    def load() -> None:
        config = ModelConfig.from_pretrained(folder, packed=packed)
        load_model(folder, TensorParallelGroup(), "bfloat16", config)

    with pytest.raises((CheckpointError, ConfigError), match=words) as error:
        load()
    assert "\n" not in str(error.value)


def test_stacks_of_other_blocks_are_another_models() -> None:
    headers = {
        name: TensorHeader(Path("model.safetensors"), name, "BF16", (4, 32, 96))
        for name in ("model.blocks.0.experts.gate_up_proj", "model.blocks.0.experts.down_proj")
    }
    assert expert_headers(headers) == ({}, set())
