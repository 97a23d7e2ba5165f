"""Planning of MoE models: weights read, FLOPs and scratch memory per forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decoding.config.settings import Settings
from decoding.planning.activations import (
    activation_elements,
    moe_scratch_bytes,
    prefill_chunk,
)
from decoding.planning.forward_cost import matmul_flops, read_bytes
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements
from parallel.config.model_config import ModelConfig
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel.model.loading import random_model
from parallel.model.moe import SparseMoE
from parallel.ranks.process_group import TensorParallelGroup
from support.models import tiny_config

MIXTURE = ModelConfig.from_hf(tiny_config("qwen3_moe"))  # 2 of 6 experts in one of three layers
PLAIN = ModelConfig.from_hf(tiny_config("qwen3"))


def expert_numel() -> int:
    """Return the allocated parameters of all experts of the model."""
    model = random_model(MIXTURE, TensorParallelGroup(), torch.float32)
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    return sum(layer.gate_up.numel() + layer.down.numel() for layer in layers)


def test_a_token_reads_its_own_experts_and_a_long_forward_reads_all() -> None:
    whole = read_bytes(MIXTURE, 1, torch.float32, 10_000)
    one = read_bytes(MIXTURE, 1, torch.float32, 1)
    assert whole - one == pytest.approx(4 * expert_numel() * 4 / 6, abs=4)
    assert read_bytes(PLAIN, 1, torch.float32, 1) == read_bytes(PLAIN, 1, torch.float32, 100)


def test_a_token_is_computed_by_its_own_experts() -> None:
    model = random_model(MIXTURE, TensorParallelGroup(), torch.float32)
    dense = [
        module.weight.rows * module.weight.columns
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    assert matmul_flops(MIXTURE) == 2 * (sum(dense) + expert_numel() * 2 / 6)


def test_wide_heads_and_experts_need_more_memory() -> None:
    def requirements_of(config: ModelConfig) -> Requirements:
        return Requirements(config, None, "plain", Settings(), torch.float32, 1, 1, False)

    default = requirements_of(PLAIN)
    wide = requirements_of(
        replace(PLAIN, head_dim=8 * PLAIN.head_dim, rotary_dim=8 * PLAIN.rotary_dim)
    )
    assert activation_elements(wide) > activation_elements(default)
    assert prefill_chunk(wide) <= prefill_chunk(default)
    assert moe_scratch_bytes(default) == 0
    tokens, experts = requirements_of(MIXTURE).max_forward_tokens, 6
    outputs = 4 * tokens * experts * MIXTURE.hidden  # lower bound with float32
    assert moe_scratch_bytes(requirements_of(MIXTURE)) > outputs
    forwards = [
        RequestSpec(requirements_of(config), 100, 10).memory.forwards for config in (MIXTURE, PLAIN)
    ]
    assert forwards[0] > forwards[1]
