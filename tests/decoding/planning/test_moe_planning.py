"""A mixture of experts is planned by what its passes read, compute and hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decoding.config.settings import Settings
from decoding.planning.forward_cost import matmul_flops, read_bytes
from decoding.planning.memory_requirements import Requirements
from parallel.config.model_config import ModelConfig
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel.model.loading import random_model
from parallel.model.moe import SparseMoE
from parallel.ranks.process_group import TensorParallelGroup
from support.models import tiny_config

MIXTURE = ModelConfig.from_hf(tiny_config("qwen3_moe"))  # 2 of 6 experts, in one of three layers
PLAIN = ModelConfig.from_hf(tiny_config("qwen3"))


def expert_numel() -> int:
    """Return the parameters of all experts of the model, as they are allocated."""
    model = random_model(MIXTURE, TensorParallelGroup(), torch.float32)
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    return sum(layer.gate_up.numel() + layer.down.numel() for layer in layers)


def test_a_token_reads_the_experts_it_is_given_to_and_a_long_pass_reads_all() -> None:
    whole = read_bytes(MIXTURE, 1, torch.float32, 10_000)
    one = read_bytes(MIXTURE, 1, torch.float32, 1)
    assert whole - one == pytest.approx(4 * expert_numel() * 4 / 6, abs=4)
    assert read_bytes(PLAIN, 1, torch.float32, 1) == read_bytes(PLAIN, 1, torch.float32, 100)


def test_a_token_is_computed_by_its_own_experts() -> None:
    model = random_model(MIXTURE, TensorParallelGroup(), torch.float32)
    products = [
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    assert matmul_flops(MIXTURE) == 2 * (sum(products) + expert_numel() * 2 / 6)


def test_wide_heads_and_mixing_are_given_memory() -> None:
    def needs(config: ModelConfig) -> Requirements:
        return Requirements(config, None, "plain", Settings(), torch.float32, 1, 1, False)

    usual = needs(PLAIN)
    wide = needs(replace(PLAIN, head_dim=8 * PLAIN.head_dim, rotary_dim=8 * PLAIN.rotary_dim))
    assert wide.activation_elements > usual.activation_elements
    assert wide.prefill_chunk <= usual.prefill_chunk
    assert usual.moe_scratch_bytes == 0
    tokens, experts = needs(MIXTURE).max_forward_tokens, 6
    outputs = 4 * tokens * experts * MIXTURE.hidden  # float32, at least
    assert needs(MIXTURE).moe_scratch_bytes > outputs
    assert needs(MIXTURE).memory(100, 10).forwards > needs(PLAIN).memory(100, 10).forwards
