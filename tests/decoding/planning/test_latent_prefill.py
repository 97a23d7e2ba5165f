"""What a prompt of a model with latent attention takes, where heads have keys and values."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from decoding import Settings
from decoding.planning.activations import activation_elements, expanded_bytes, has_own_kv
from decoding.planning.forward_cost import matmul_flops, prefill_flops
from decoding.planning.requirements import Requirements
from offload.layout import EXPANDED_TOKENS, OBSERVED_ROWS
from offload.prefill.layer_major import Prefill
from parallel.config.model_config import ModelConfig
from parallel.model.latent_attention import LatentAttention
from parallel.model.loading import random_model
from parallel.ranks.process_group import TensorParallelGroup
from support.caches import resident
from support.live_bytes import LiveBytes
from support.models import random_tokens, tiny_config

# the proportions of GLM-4.7-Flash, and of DeepSeek's models: values are narrower than keys
SIZES = {
    "glm": {"kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 32},
    "deepseek": {
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize("chunk", [20, 50])
def test_prefill_flops_are_counted(chunk: int) -> None:
    """Heads have keys and values of their own in the larger chunks alone."""
    config = ModelConfig.from_hf(tiny_config("minicpm3", num_hidden_layers=4))
    assert config.latent is not None
    assert config.latent.has_own_kv(chunk) == (chunk == 50)
    model, tokens = random_model(config, TensorParallelGroup(), torch.float32), 400
    prompt = Prefill(resident(model, tokens), tokens)
    with FlopCounterMode(display=False) as counted, prompt as prefill:
        model.prefill(random_tokens(tokens), prefill, chunk)
    total = sum(counted.get_flop_counts()["Global"].values())
    matmul, _ = prefill_flops(config, tokens, tokens // chunk)
    # logits, and the outputs of the last rows in the last layer, are not counted
    rows = min(chunk, OBSERVED_ROWS)
    stored = 2 * config.hidden * config.latent.head_dim
    uncounted = 2 * config.hidden * config.vocab + rows * (matmul_flops(config) / 4 - stored)
    assert matmul + uncounted == pytest.approx(total)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("chunk", [300, 2000])
@torch.inference_mode()
def test_a_layer_takes_the_planned_memory(sizes: str, chunk: int) -> None:
    fields = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = ModelConfig.from_hf(tiny_config("minicpm3", **fields, **SIZES[sizes]))
    needs = Requirements(config, None, "plain", Settings(mode="plain"), torch.float32, 1, 1, True)
    model, tokens = random_model(config, TensorParallelGroup(), torch.float32), 20_000
    attention = cast(LatentAttention, model.layers[0].attention)
    x = torch.randn(tokens, config.hidden)
    with Prefill(resident(model, tokens), tokens) as prefill:
        attention.store_kv(x[:-chunk], prefill, 0)
        last = x[-chunk:].clone()
        held = [each.untyped_storage() for each in (last, *prefill._cache.layers[0].buffer)]
        held += [each.untyped_storage() for each in attention.parameters()]
        with LiveBytes() as live:
            attention.prefill(last, prefill, tokens - chunk)()
    assert has_own_kv(needs, chunk)
    taken = live.peak - sum({each.data_ptr(): each.nbytes() for each in held}.values())
    planned = 4 * chunk * activation_elements(needs, own_kv=True)
    planned += expanded_bytes(needs, tokens, chunk)
    assert EXPANDED_TOKENS + chunk < tokens
    assert 0.5 * planned < taken <= planned
