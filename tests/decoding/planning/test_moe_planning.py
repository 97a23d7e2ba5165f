"""Planning of MoE models: weights read, FLOPs and scratch memory per forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from decoding.config.settings import Settings
from decoding.planning.activations import (
    activation_elements,
    moe_scratch_bytes,
    prefill_chunk,
)
from decoding.planning.forward_cost import ForwardCost, matmul_flops, read_bytes
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements, weight_notes
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import active_share
from parallel.config.weight_sizes import weight_sizes
from parallel.formats.plane_format import PLANE_FORMATS
from parallel.model.layers import ColumnParallelLinear, RowParallelLinear
from parallel.model.loading import random_model
from parallel.model.moe import Experts
from parallel.ranks.process_group import TensorParallelGroup
from support.models import tiny_config

MIXTURE = ModelConfig.from_hf(tiny_config("qwen3_moe"))  # 2 of 6 experts in one of three layers
PLAIN = ModelConfig.from_hf(tiny_config("qwen3"))


def expert_numel() -> int:
    """Return the allocated parameters of all experts of the model."""
    model = random_model(MIXTURE, TensorParallelGroup(), torch.float32)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    matrices = [matrix for layer in layers for matrix in (layer.gate_up, layer.down)]
    return sum(matrix.rows * matrix.columns for matrix in matrices)


def test_a_token_reads_its_own_experts_and_a_long_forward_reads_all() -> None:
    whole, one = (
        read_bytes(MIXTURE, 1, torch.float32, active_share(MIXTURE, tokens))
        for tokens in (10_000, 1)
    )
    assert whole - one == pytest.approx(4 * expert_numel() * 4 / 6, abs=4)
    assert active_share(PLAIN, 1) == active_share(PLAIN, 100)


def test_a_token_is_computed_by_its_own_experts() -> None:
    model = random_model(MIXTURE, TensorParallelGroup(), torch.float32)
    dense = [
        module.weight.rows * module.weight.columns
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    assert matmul_flops(MIXTURE) == 2 * (sum(dense) + expert_numel() * 2 / 6)


def packed_qwen3_30b() -> ModelConfig:
    """Return Qwen3-30B-A3B with all matrices in Q4_K."""
    hf = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151_936,
        tie_word_embeddings=False,
    )
    names = ["model.embed_tokens", "lm_head"]
    for layer in range(48):
        prefix = f"model.layers.{layer}"
        names += [f"{prefix}.self_attn.{each}_proj" for each in "qkvo"]
        names += [f"{prefix}.mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")]
    types = tuple((f"{name}.weight", PLANE_FORMATS["Q4_K"]) for name in names)
    return replace(ModelConfig.from_hf(hf), kept_types=types)


def test_packed_experts_are_read_as_they_are_stored() -> None:
    config = packed_qwen3_30b()
    sizes = weight_sizes(config, 1, 2)
    experts = 48 * 128 * 3 * 768 * 2048
    assert (sizes.kept_experts, sizes.whole_experts) == (experts, 0)
    assert sizes.experts == experts * (16 + 4 / 8 + 2) // 32  # 18.5 bytes of 32 weights
    assert 17.5e9 < sizes.nbytes < 18.5e9
    whole = replace(config, kept_types=())
    assert weight_sizes(whole, 1, 2).experts == 2 * experts
    per_token = read_bytes(config, 1, torch.bfloat16, active_share(config, 1))
    assert per_token == pytest.approx(
        sizes.nbytes - sizes.embedding - sizes.experts * 120 / 128, abs=1
    )
    hardware = HardwareProfile.from_name("1x4090")
    packed, plain = (
        ForwardCost(hardware, each, 1, torch.bfloat16).seconds(1, 1000, captured=True)
        for each in (config, whole)
    )
    assert packed < plain
    needs = Requirements(config, None, "plain", Settings(), torch.bfloat16, 1, 1, True)
    needs_whole = replace(needs, target=whole)
    assert moe_scratch_bytes(needs) < moe_scratch_bytes(needs_whole) / 5
    specs = [RequestSpec(each, 10_000, 10) for each in (needs, needs_whole)]
    hidden = [spec.hidden_bytes(10_000) for spec in specs]
    assert hidden[0] - hidden[1] == 2 * 768 * 2048 * 2  # one expert's gate and up
    costs = [ForwardCost(hardware, each, 1, torch.bfloat16) for each in (config, whole)]
    one, many = (costs[0].prefill(10_000, 0, chunks)[0] for chunks in (1, 11))
    unpacked = sizes.experts + 4 * sizes.kept_experts  # read, written and read again
    assert many - one == pytest.approx(10 * unpacked / hardware.memory_rate)
    assert costs[1].prefill(10_000, 0, 1) == costs[1].prefill(10_000, 0, 11)
    assert weight_notes(needs) == weight_notes(needs_whole) == []
    some = tuple(each for each in config.kept_types if "gate_proj" not in each[0])
    (note,) = weight_notes(replace(needs, target=replace(config, kept_types=some)))
    assert note.startswith("67% of the experts' weights are stored in 16 bits")


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
