"""Multi-token-prediction blocks: their logits, on one rank and two, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.cache.streaming_shape import StreamingCacheSpec
from parallel.config.model_config import ModelConfig, predictor_config
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError
from parallel.model.loading import load_model, load_predictor, parameter_bytes
from parallel.ranks.process_group import TensorParallelGroup
from support.families import OTHERS
from support.loading import assert_same_parameters
from support.models import random_tokens
from support.predictors import ReferencePredictor, prediction_cache, with_predictor
from support.quantised import PROJECTIONS, fp8, quantise
from support.ranks import run_ranks

Checkpoints = Callable[..., Path]
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TIED = "qwen3_5"  # the one whose head is its embedding
# sizes of which rows are whole blocks of Q8_0
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
WIDE_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
TOKENS, DRAFT = random_tokens(60), 5


@pytest.fixture(scope="module")
def folders(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("predictors")
    tied = {"tie_word_embeddings": True}
    return [
        with_predictor(checkpoint(**OTHERS[kind], **(tied if kind == TIED else {})), parent / kind)
        for kind in KINDS
    ]


def drafted(folder: Path, group: TensorParallelGroup) -> Tensor:
    """Return the logits (n, V) of a greedy draft after TOKENS, on this rank."""
    block = load_predictor(folder, load_model(folder, group, "float32"))
    cache = prediction_cache(block, StreamingCacheSpec(0, 128, 64, hidden=block.config.hidden))
    cache.hidden_states.record(ReferencePredictor(folder).hidden_states(TOKENS[:-1]), 0)
    cache.skip_tokens(1)
    tokens, logits = TOKENS[1:], list[Tensor]()
    for _ in range(DRAFT):
        logits.append(block(tokens, cache, 1)[0])
        cache.advance(len(tokens))
        tokens = logits[-1].argmax()[None]
    return torch.stack(logits)


def drafted_on_rank(folders: list[Path]) -> list[Tensor]:
    group = TensorParallelGroup.from_environment("cpu")
    return [drafted(folder, group) for folder in folders]


def test_drafts_are_those_of_transformers_modules(folders: list[Path]) -> None:
    """Hidden states are transformers' own; so are those that the block predicts for its draft."""
    expected = [
        torch.stack(list(ReferencePredictor(folder).chain(TOKENS, DRAFT))) for folder in folders
    ]
    for logits in (drafted_on_rank(folders), *run_ranks(2, drafted_on_rank, folders)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_weights_are_as_planned(folders: list[Path]) -> None:
    for folder in folders:
        config = ModelConfig.from_pretrained(folder)
        assert config == ModelConfig.from_name(str(folder))
        assert config.has_predictor
        for ranks in (1, 2):
            for rank in range(ranks):
                target = load_model(folder, TensorParallelGroup(rank, ranks), "float32", config)
                both = parameter_bytes(target, load_predictor(folder, target))
                own = weight_sizes(predictor_config(config), ranks, 4, rank)
                assert both - parameter_bytes(target) == own.nbytes
                assert config.tied == (folder.name == TIED)
                assert target.head.weight.values is not None
                assert own.shared == target.head.weight.values.nbytes


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_a_gguf_file_holds_the_same_block(folders: list[Path], index: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from support.gguf import convert

    path = convert(folders[index], tmp_path / "model.gguf")
    assert ModelConfig.from_name(str(path)).has_predictor
    for group in (TensorParallelGroup(), TensorParallelGroup(1, 2)):
        one, other = (
            load_predictor(each, load_model(each, group, "float32"))
            for each in (folders[index], path)
        )
        assert_same_parameters(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_blocks_are_planned(checkpoint: Checkpoints, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    from gguf import GGMLQuantizationType as Kind

    from support.gguf import convert

    sizes = WIDE | (WIDE_EXPERTS if kind != "qwen3_5" else {})
    folder = with_predictor(checkpoint(**{**OTHERS[kind], **sizes}), tmp_path / kind)
    path = convert(folder, tmp_path / "packed.gguf", Kind.Q8_0)
    config = ModelConfig.from_pretrained(path, packed=True)
    names = {name for name, _ in predictor_config(config).kept_types}
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "lm_head.weight"} <= names
    assert not any(name.startswith("model.layers.") for name in names)
    for ranks in (1, 2):
        for rank in range(ranks):
            target = load_model(path, TensorParallelGroup(rank, ranks), "bfloat16", config)
            before = parameter_bytes(target)
            planned = weight_sizes(predictor_config(config), ranks, 2, rank)
            held = parameter_bytes(target, load_predictor(path, target)) - before
            assert abs(held - planned.nbytes - planned.scratch) < 4000  # float32
            head = target.head.weight.packed
            assert head is not None
            assert planned.shared == sum(each.nbytes for each in head.parameters())


@pytest.mark.parametrize("names", [PROJECTIONS, (*PROJECTIONS, "fc")], ids=["layer", "all"])
def test_blocks_of_quantised_safetensors(
    checkpoint: Checkpoints, tmp_path: Path, names: tuple[str, ...]
) -> None:
    sizes = {**WIDE, "head_dim": 32}
    plain = with_predictor(checkpoint(**{**OTHERS["qwen3_5"], **sizes}), tmp_path / "plain")
    folder = tmp_path / "fp8"
    kind = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantise(plain, folder, kind, fp8((32, 32), torch.bfloat16, "weight_scale_inv"), names)
    config = ModelConfig.from_pretrained(folder, packed=True)
    kept = {name for name, _ in predictor_config(config).kept_types}
    assert ("mtp.fc.weight" in kept) == ("fc" in names)
    assert "mtp.layers.0.mlp.down_proj.weight" in kept
    logits = []
    for own in (config, replace(config, kept_types=())):
        target = load_model(folder, TensorParallelGroup(), "float32", own)
        block = load_predictor(folder, target)
        cache = prediction_cache(block, StreamingCacheSpec(0, 128, 64, hidden=config.hidden))
        cache.skip_tokens(1)
        logits.append(block(TOKENS[1:], cache, 5))
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("prefix", ["model.mtp.", "model.language_model.mtp."])
def test_blocks_within_larger_models(checkpoint: Checkpoints, tmp_path: Path, prefix: str) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.startswith("mtp.")]:
            tensors[prefix + name.removeprefix("mtp.")] = tensors.pop(name)

    plain = checkpoint(**OTHERS["qwen3_5"])
    one = with_predictor(plain, tmp_path / "one")
    other = with_predictor(plain, tmp_path / "other", rename)
    blocks = [
        load_predictor(each, load_model(each, TensorParallelGroup(), "float32"))
        for each in (one, other)
    ]
    assert_same_parameters(*blocks)


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def with_another(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.ones(2, 2)})


@pytest.mark.parametrize(
    "edit",
    [
        without("mtp.norm.weight"),
        without("mtp.fc.weight"),
        without("mtp.layers.0.self_attn.k_norm.weight"),
        without("mtp.layers.0.mlp.gate_proj.weight"),
        with_another("mtp.layers.1.self_attn.q_proj.weight"),
        with_another("mtp.embed_tokens.weight"),
    ],
)
def test_other_blocks_are_left_out(
    edit: Callable[[dict[str, Tensor]], Any], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = with_predictor(checkpoint(**OTHERS["qwen3_5"]), tmp_path / "other", edit)
    assert not ModelConfig.from_pretrained(folder).has_predictor
    load_model(folder, TensorParallelGroup(), "float32")


def test_a_block_of_another_size_is_an_error(checkpoint: Checkpoints, tmp_path: Path) -> None:
    edit = with_another("mtp.fc.weight")
    folder = with_predictor(checkpoint(**OTHERS["qwen3_5"]), tmp_path / "broken", edit)
    target = load_model(folder, TensorParallelGroup(), "float32")
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight has shape \(2, 2\), but config.json"):
        load_predictor(folder, target)
