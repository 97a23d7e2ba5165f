"""Packed experts: the weights of their file, in every variant of the mixture, and in plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind

import parallel.weights.packed
from parallel.config.families import Gating
from parallel.config.model_config import ModelConfig
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError
from parallel.model.loading import load_model, parameter_bytes
from parallel.model.moe import SparseMoE, moe_by_expert, route, static_moe
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.routing import Routing
from support.gguf import convert
from support.interpreter import import_interpreted
from support.loading import all_logits
from support.models import WIDE, random_tokens
from support.quantised import fp8, gptq, quantise
from support.ranks import run_ranks

Checkpoints = Callable[..., Path]
QWEN3 = {
    "family": "qwen3_moe",
    "head_dim": 64,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    **WIDE,
}
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def mixtures(folder: Path, dtype: str) -> tuple[SparseMoE, SparseMoE]:
    """Return the first layer's mixture with packed experts, and with whole ones."""
    group, config = TensorParallelGroup(), ModelConfig.from_pretrained(folder, packed=True)
    models = load_model(folder, group, dtype, config), load_model(folder, group, dtype)
    packed, whole = (model.layers[0].mlp for model in models)
    assert isinstance(packed, SparseMoE)
    assert isinstance(whole, SparseMoE)
    assert packed.experts.gate_up.packed is not None
    assert packed.experts.down.packed is not None
    assert whole.experts.gate_up.packed is whole.experts.down.packed is None
    return packed, whole


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("moe", [moe_by_expert, static_moe])
def test_outputs_are_those_of_whole_experts(
    checkpoint: Checkpoints, tmp_path: Path, kind: Kind, moe: Callable[..., Any]
) -> None:
    packed, whole = mixtures(convert(checkpoint(**QWEN3), tmp_path / "m.gguf", kind), "float32")
    for expert in (0, 3, 5):
        assert torch.equal(packed.experts.gate_up.of(expert), whole.experts.gate_up.of(expert))
    routing = Routing.of(torch.tensor([5, 0, 5]), 6)
    x = torch.randn(3, 512)
    products = [each.experts.down.products(x, routing, 1) for each in (packed, whole)]
    assert torch.equal(*products)
    for tokens in (1, 5):
        x = torch.randn(tokens, 256)
        weights, chosen = route(torch.randn(tokens, 6), 2, Gating(normalised=True))
        out = moe(x, weights, chosen, packed.experts)
        expected = moe_by_expert(x, weights, chosen, whole.experts)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_fused_products(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = import_interpreted("parallel.weights.kernels")
    folder = checkpoint(**{**QWEN3, "moe_intermediate_size": 256})
    packed, whole = mixtures(convert(folder, tmp_path / "m.gguf", Kind.Q4_K), "float32")
    for each in (packed.experts.gate_up.packed, packed.experts.down.packed):
        assert each is not None
        each.dtype = torch.float16
    monkeypatch.setattr(parallel.weights.packed, "plane_kernels", lambda *_: (kernels, ""))
    x = torch.randn(2, 256).half()
    weights, chosen = route(torch.randn(2, 6), 2, Gating(normalised=True))
    assert packed.experts.gate_up.has_fused_products
    out = static_moe(x, weights, chosen, packed.experts)
    assert out.dtype == torch.float16
    expected = moe_by_expert(x.float(), weights, chosen, whole.experts)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    # a token's result does not depend on the others
    alone = static_moe(x[1:], weights[1:], chosen[1:], packed.experts)
    assert torch.equal(alone, out[1:])


def logits_on_this_rank(path: Path) -> Any:
    group = TensorParallelGroup.from_environment("cpu")
    config = ModelConfig.from_pretrained(path, packed=True)
    model = load_model(path, group, "float32", config)
    assert model.layers[0].mlp.experts.down.packed is not None
    return all_logits(model, random_tokens(60))


@pytest.mark.slow
def test_two_ranks_equal_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = convert(checkpoint(**QWEN3), tmp_path / "m.gguf", Kind.Q4_K)
    alone = all_logits(load_model(path, TensorParallelGroup(), "float32"), random_tokens(60))
    for logits in run_ranks(2, logits_on_this_rank, path):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


CONVERSIONS = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8((128, 128), torch.float32, "weight_scale_inv"),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, gptq()),
    "act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        gptq(permuted=True),
    ),
}


@pytest.mark.parametrize("method", CONVERSIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_safetensors(checkpoint: Checkpoints, tmp_path: Path, method: str, ranks: int) -> None:
    """Each expert has tensors of its own; those in an order of their own are in 16 bits."""
    config, convert_matrix = CONVERSIONS[method]
    folder = tmp_path / "quantised"
    quantise(checkpoint(**QWEN3), folder, config, convert_matrix, EXPERT_NAMES)
    packed = ModelConfig.from_pretrained(folder, packed=True)
    assert packed == ModelConfig.from_name(str(folder), packed=True)
    assert len(packed.kept_types) == (0 if method == "act-order" else 2 * 3)
    group = TensorParallelGroup(ranks - 1, ranks)
    model = load_model(folder, group, "bfloat16", packed)
    is_packed = model.layers[0].mlp.experts.gate_up.packed is not None
    assert is_packed == (method != "act-order")
    sizes = weight_sizes(packed, ranks, 2, group.rank)
    assert parameter_bytes(model) == sizes.nbytes + sizes.scratch
    assert (sizes.kept_experts > 0, sizes.whole_experts == 0) == (is_packed, is_packed)
    whole = load_model(folder, group, "bfloat16")
    for expert in (0, 5):
        assert torch.equal(
            model.layers[1].mlp.experts.down.of(expert), whole.layers[1].mlp.experts.down.of(expert)
        )


def test_an_unannounced_order_of_columns_is_refused(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A plan cannot know it from headers, and would count packed experts."""
    config, _ = CONVERSIONS["gptq"]
    folder = tmp_path / "quantised"
    quantise(checkpoint(**QWEN3), folder, config, gptq(permuted=True), EXPERT_NAMES)
    packed = ModelConfig.from_pretrained(folder, packed=True)
    with pytest.raises(CheckpointError, match=r"has no desc_act: use `weights` 16-bit"):
        load_model(folder, TensorParallelGroup(), "bfloat16", packed)
    load_model(folder, TensorParallelGroup(), "bfloat16")


def test_experts_of_different_types_are_whole(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """One expert is not quantised, as some methods leave out those that were never chosen."""
    config, convert_matrix = CONVERSIONS["fp8"]
    folder = tmp_path / "quantised"
    skipped = iter(range(10**6))

    def convert_all_but_one(weight: Any) -> Any:
        if next(skipped) == 4:
            return {"weight": weight}, weight
        return convert_matrix(weight)

    quantise(checkpoint(**QWEN3), folder, config, convert_all_but_one, EXPERT_NAMES)
    packed = ModelConfig.from_pretrained(folder, packed=True)
    model = load_model(folder, TensorParallelGroup(), "bfloat16", packed)
    kept = [
        matrix.packed is not None
        for layer in model.layers
        for matrix in (layer.mlp.experts.gate_up, layer.mlp.experts.down)
    ]
    assert kept.count(False) == 1
    assert parameter_bytes(model) == weight_sizes(packed, 1, 2).nbytes
