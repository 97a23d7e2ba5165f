"""Types that are another but in name, with other names of fields and tensors, equal it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from parallel.config.model_config import ModelConfig
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError, ConfigError
from parallel.model.loading import load_model, parameter_bytes
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import Matrix
from support.internlm2 import as_internlm2
from support.loading import all_logits, assert_same_parameters
from support.models import TINY, WIDE, edit_weights, random_tokens, reference_logits, rope
from support.quantised import fp8, quantise

MLP_PROJECTIONS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXAONE_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "c_fc_0", "c_fc_1", "c_proj")
INTERNLM2_PROJECTIONS = ("wqkv", "wo", "w1", "w2", "w3")
Names = tuple[str, ...]
PUBLISHED_EXAONE = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


def text_logits(folder: Path, tokens: Tensor) -> Tensor:
    return all_logits(load_model(folder, TensorParallelGroup(), "float32"), tokens)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


def published_exaone(folder: Path, target: Path) -> Path:
    """Write a copy whose config.json is as published, not as transformers writes it."""

    def rename(fields: dict[str, Any]) -> None:
        renamed = {PUBLISHED_EXAONE.get(name, name): value for name, value in fields.items()}
        rope = renamed.pop("rope_parameters")
        renamed |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        fields.clear()
        fields.update(renamed, auto_map={"AutoConfig": "configuration_exaone.ExaoneConfig"})

    shutil.copytree(folder, target)
    edit_config(target, rename)
    return target


def test_exaone_is_a_llama(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    written, tokens = checkpoint(family="exaone"), random_tokens(60)
    folder = published_exaone(written, tmp_path / "exaone")
    config = ModelConfig.from_pretrained(folder)
    assert config == ModelConfig.from_name(str(folder))
    assert config == ModelConfig.from_pretrained(written)
    torch.testing.assert_close(
        text_logits(folder, tokens), reference_logits(written, tokens), atol=1e-4, rtol=1e-4
    )
    (tmp_path / "config.json").write_text('{"model_type": "exaone"}')
    with pytest.raises(ConfigError, match="lacks hidden_size, num_hidden_layers, "):
        ModelConfig.from_name(str(tmp_path))


def test_defaults_of_exaone(tmp_path: Path) -> None:
    required = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    fields = {"model_type": "exaone", "num_layers": 3} | {name: TINY[name] for name in required}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_attention_heads": 8}))
    config = ModelConfig.from_name(str(tmp_path))
    hf = CONFIG_MAPPING["exaone"].from_dict(fields)
    assert config.kv_heads == hf.num_key_value_heads
    assert config.max_positions == hf.max_position_embeddings
    assert config.norm_eps == hf.rms_norm_eps
    assert config.rope["rope_theta"] == hf.rope_parameters["rope_theta"]
    assert config.stop_tokens == {hf.eos_token_id}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, name: tensors.pop(name),
            "tensor transformer.h.1.attn.attention.out_proj.weight is missing",
        ),
        (
            lambda tensors, name: tensors.update({name: torch.zeros(32, 3)}),
            "tensor transformer.h.1.attn.attention.out_proj.weight has shape (32, 3), but",
        ),
        (
            lambda tensors, name: tensors.update({f"{name[:-6]}bias": torch.zeros(32)}),
            "not part of the model that config.json describes, first "
            "transformer.h.1.attn.attention.out_proj.bias",
        ),
    ],
    ids=["missing", "shape", "unused"],
)
def test_errors_have_the_names_in_the_file(
    change: Callable[[dict[str, Tensor], str], None],
    message: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(checkpoint(family="exaone"), tmp_path / "exaone")
    name = "transformer.h.1.attn.attention.out_proj.weight"
    edit_weights(folder, lambda tensors: change(tensors, name))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_model(folder, TensorParallelGroup())
    assert str(caught.value).isprintable()


def assert_packed(folder: Path, fp8_folder: Path, names: Names, attention: Names) -> None:
    """Quantise the modules of these names; assert that they stay packed as a plan says.

    `attention`: what those of attention are called here.
    """
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    convert = fp8((32, 32), torch.float32, "weight_scale_inv")
    quantise(folder, fp8_folder, config, convert, names)
    read = ModelConfig.from_pretrained(fp8_folder, packed=True)
    assert read == ModelConfig.from_name(str(fp8_folder), packed=True)
    layers = range(WIDE["num_hidden_layers"])
    assert {name for name, _ in read.kept_types} == {
        f"model.layers.{layer}.{name}.weight"
        for layer in layers
        for name in (*(f"self_attn.{each}" for each in attention), *MLP_PROJECTIONS)
    }
    for rank in range(2):
        group = TensorParallelGroup(rank=rank, size=2)
        packed = load_model(fp8_folder, group, "float32", read)
        matrices = [each for each in packed.modules() if isinstance(each, Matrix)]
        assert sum(each.packed is not None for each in matrices) == 4 * len(layers)
        sizes = weight_sizes(read, 2, 4, rank)
        assert parameter_bytes(packed) == sizes.nbytes + sizes.scratch
    packed = load_model(fp8_folder, TensorParallelGroup(), "float32", read)
    tokens = random_tokens(20)
    torch.testing.assert_close(all_logits(packed, tokens), text_logits(fp8_folder, tokens))


def test_quantised_exaone_stays_packed_as_planned(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint(family="exaone", **WIDE, head_dim=64)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert_packed(folder, tmp_path / "fp8", EXAONE_PROJECTIONS, attention)


INTERNLM2: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "dynamic": {"rope_parameters": rope("dynamic", factor=2.0), "max_position_embeddings": 32},
}


@pytest.mark.parametrize("name", INTERNLM2)
def test_internlm2_is_a_llama(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    llama, tokens = checkpoint(**INTERNLM2[name]), random_tokens(60)
    folder = as_internlm2(llama, tmp_path / "internlm2")
    expected = reference_logits(llama, tokens)
    torch.testing.assert_close(text_logits(folder, tokens), expected, atol=1e-4, rtol=1e-4)
    config = ModelConfig.from_pretrained(folder)
    assert config == ModelConfig.from_name(str(folder))
    llama_config = ModelConfig.from_pretrained(llama)
    assert config.rope.items() >= llama_config.rope.items()
    assert config == replace(llama_config, rope=config.rope, fused_qkv=True, grouped_qkv=True)
    assert_same_parameters(
        load_model(folder, TensorParallelGroup()), load_model(llama, TensorParallelGroup())
    )


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_reads_its_heads_of_internlm2(
    rank: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    llama, group = checkpoint(attention_bias=True), TensorParallelGroup(rank=rank, size=2)
    folder = as_internlm2(llama, tmp_path / "internlm2")
    assert_same_parameters(load_model(folder, group), load_model(llama, group))


@pytest.mark.parametrize("name", ["self_attn.key_layernorm", "mlp.up_proj"])
def test_errors_have_names_of_hunyuan(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(family="hunyuan_v1_dense"), tmp_path / "hunyuan")
    edit_weights(folder, lambda tensors: tensors.pop(f"model.layers.1.{name}.weight"))
    with pytest.raises(CheckpointError, match=rf"tensor model\.layers\.1\.{name}\.weight is mis"):
        load_model(folder, TensorParallelGroup())


@pytest.mark.parametrize("name", ["model.layers.1.attention.wqkv.weight", "output.weight"])
def test_errors_have_names_of_internlm2(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = as_internlm2(checkpoint(), tmp_path / "internlm2")
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} has shape "):
        load_model(folder, TensorParallelGroup())
    edit_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} is missing"):
        load_model(folder, TensorParallelGroup())


def test_defaults_of_internlm2(tmp_path: Path) -> None:
    fields = {"model_type": "internlm2", **TINY}
    del fields["max_position_embeddings"], fields["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_name(str(tmp_path))
    assert config == ModelConfig.from_pretrained(tmp_path)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)
    assert (config.kv_heads, config.max_positions, config.norm_eps) == (4, 2048, 1e-6)


def test_quantised_internlm2_stays_packed_as_planned(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    llama = checkpoint(**WIDE, head_dim=64)
    folder = as_internlm2(llama, tmp_path / "internlm2")
    assert_packed(folder, tmp_path / "fp8", INTERNLM2_PROJECTIONS, ("qkv_proj", "o_proj"))
