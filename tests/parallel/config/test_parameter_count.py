"""The parameter count from the config equals what is allocated, in every family, on every rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM

from parallel.config.model_config import FAMILIES, ModelConfig
from parallel.config.parameter_count import parameter_count
from parallel.model.loading import load_model, random_model
from parallel.ranks.process_group import TensorParallelGroup
from support.families import OTHERS
from support.models import tiny_config

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 12},
    "odd-heads": {"num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 80},
    "odd": {"intermediate_size": 49, "vocab_size": 103},
    "even": {"vocab_size": 100, "moe_intermediate_size": 21},
}


def allocated_parameters(model: Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


MODELS = {family: {"family": family} for family in FAMILIES}
MODELS |= {name: OTHERS[name] for name in ("granite-mamba", "granite-experts")}


@pytest.mark.parametrize(
    ("name", "variant"),
    # such biases of Nemotron-H are refused
    [each for each in product(MODELS, VARIANTS) if each != ("nemotron_h", "biases")],
)
def test_count_equals_allocated_parameters(name: str, variant: str) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = ModelConfig.from_hf(tiny_config(**MODELS[name] | heads | VARIANTS[variant]))
    for ranks in (1, 2, 4):
        counts = []
        for rank in range(ranks):
            count = parameter_count(config, ranks, rank)
            assert count == allocated_parameters(
                random_model(config, TensorParallelGroup(rank, ranks), torch.float32)
            )
            counts.append(count)
        assert parameter_count(config, ranks) == max(counts)


# Cohere's branches have one norm there, and EXAONE 3 is a Llama here.
@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"cohere", "cohere2", "exaone"}))
def test_count_equals_that_of_transformers(name: str) -> None:
    fields = {key: each for key, each in OTHERS[name].items() if key != "seed"}
    hf = tiny_config(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    # tied ones are the same object; some are buffers
    stored = {id(each): each.numel() for each in model.state_dict(keep_vars=True).values()}
    assert parameter_count(ModelConfig.from_hf(hf), 1) == sum(stored.values())


def test_count_equals_loaded_parameters(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(family="qwen2")
    config = ModelConfig.from_pretrained(folder)
    for rank in range(2):
        model = load_model(folder, TensorParallelGroup(rank, 2))
        assert parameter_count(config, 2, rank) == allocated_parameters(model)


def test_parameter_count_does_not_import_torch() -> None:
    code = "import sys, parallel.config.parameter_count; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
