"""Types that are another but in name, with other names of fields and tensors, equal it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import Matrix
from support.loading import all_logits
from support.models import TINY, WIDE, edit_weights, random_tokens, reference_logits
from support.quantised import fp8, quantise

MLP_PROJECTIONS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXAONE_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "c_fc_0", "c_fc_1", "c_proj")
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


def test_quantised_exaone_stays_packed_as_planned(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, tokens = checkpoint(family="exaone", **WIDE, head_dim=64), random_tokens(20)
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    convert = fp8((32, 32), torch.float32, "weight_scale_inv")
    quantise(folder, tmp_path / "fp8", config, convert, EXAONE_PROJECTIONS)
    read = ModelConfig.from_pretrained(tmp_path / "fp8", packed=True)
    assert read == ModelConfig.from_name(str(tmp_path / "fp8"), packed=True)
    assert {name for name, _ in read.kept_types} == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(WIDE["num_hidden_layers"])
        for name in (*(f"self_attn.{each}_proj" for each in "qkvo"), *MLP_PROJECTIONS)
    }
    model = load_model(tmp_path / "fp8", TensorParallelGroup(), "float32", read)
    matrices = [each for each in model.modules() if isinstance(each, Matrix)]
    assert sum(each.packed is not None for each in matrices) == 4 * WIDE["num_hidden_layers"]
    whole = load_model(tmp_path / "fp8", TensorParallelGroup(), "float32")
    torch.testing.assert_close(all_logits(model, tokens), all_logits(whole, tokens))
