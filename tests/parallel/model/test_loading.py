"""A rank loads only its share of a checkpoint: of memory, and of every tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from parallel.errors import CheckpointError
from parallel.model.loading import load_model
from parallel.model.moe import Router
from parallel.ranks.process_group import TensorParallelGroup
from support.loading import load_and_watch
from support.models import build_checkpoint, edit_weights
from support.ranks import run_ranks


def test_peak_memory_is_the_ranks_share(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "vocab_size": 4000,
    }
    folder = build_checkpoint(
        tmp_path / "large", num_key_value_heads=12, max_shard_size="80MB", **sizes
    )
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 150e6 < total < 250e6
    # in a fresh process
    [(share, peak)] = run_ranks(1, load_and_watch, folder, build_checkpoint(tmp_path / "small"))
    assert 0.49 * total < share < 0.52 * total
    assert peak <= 1.3 * share


def test_shares_of_two_ranks_concatenate_to_the_whole(tmp_path: Path) -> None:
    """Rows and columns of both ranks' matrices, concatenated, are the whole model's."""
    folder = build_checkpoint(tmp_path, family="qwen2")
    whole = dict(load_model(folder, TensorParallelGroup()).named_parameters())
    parts = [
        dict(load_model(folder, TensorParallelGroup(rank, 2)).named_parameters())
        for rank in range(2)
    ]
    for name, parameter in whole.items():
        first, second = (part[name] for part in parts)
        if name.endswith(("norm.weight", "o.bias", "down.bias")):
            assert torch.equal(first, parameter)
            assert torch.equal(second, parameter)
        elif name in ("embed.weight.values", "head.weight.values"):
            assert torch.equal(torch.cat((first, second))[: len(parameter)], parameter)
            assert not second[len(parameter) - len(first) :].any()  # padding holds zeros
        elif name.endswith(("o.weight.values", "down.weight.values")):
            assert torch.equal(torch.cat((first, second), dim=1), parameter)
        else:  # stacked matrices, each split by rows
            sizes = [16, 8, 8] if "qkv" in name else [24, 24]
            pairs = zip(first.split(sizes), second.split(sizes), strict=True)
            assert torch.equal(torch.cat([part for pair in pairs for part in pair]), parameter)


def test_layers_that_predict_further_tokens_are_left(tmp_path: Path) -> None:
    """Files of GLM-4.5 have one after the model's own; any other leftover is an error."""
    folder = build_checkpoint(tmp_path, family="glm4_moe", num_mtp_layers=1)
    plain = dict(load_model(folder, TensorParallelGroup()).named_parameters())
    name = "model.layers.3.eh_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(4, 4)}))
    loaded = load_model(folder, TensorParallelGroup()).named_parameters()
    assert all(torch.equal(parameter, plain[key]) for key, parameter in loaded)
    edit_weights(folder, lambda tensors: tensors.update({name.replace("3", "4"): torch.ones(4)}))
    with pytest.raises(CheckpointError, match=r"1 tensors are not part of .* first model.layers.4"):
        load_model(folder, TensorParallelGroup())


def test_ernies_block_that_predicts_further_tokens_is_left(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, family="ernie4_5_moe")
    names = ("block.0.input_layernorm", "emb_norm.0", "hidden_norm.0", "linear_proj.0")
    added = {f"model.mtp_{name}.weight": torch.ones(4) for name in names}
    edit_weights(folder, lambda tensors: tensors.update(added))
    load_model(folder, TensorParallelGroup())


@pytest.mark.parametrize("family", ["deepseek_v2", "ernie4_5_moe", "glm4_moe"])
def test_routers_are_in_float32(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path, family=family, dtype=torch.bfloat16)
    model = load_model(folder, TensorParallelGroup())
    routers = [each for each in model.modules() if isinstance(each, Router)]
    assert len(routers) == 2
    assert {each.weight.dtype for each in routers} == {torch.float32}
    assert model.embed.weight.dtype == torch.bfloat16


def test_a_symbolic_link_loads_the_same_model(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model")
    os.symlink(folder, tmp_path / "link")  # like a hub cache
    one = load_model(folder, TensorParallelGroup())
    two = load_model(tmp_path / "link", TensorParallelGroup())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
