"""If files and config disagree, the tensors in the files decide, as in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import parameter_count
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.weight_headers import stored_tensors
from parallel.model.loading import load_model, parameter_bytes
from parallel.ranks.process_group import TensorParallelGroup
from support.loading import all_logits
from support.models import random_tokens, reference_logits

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Checkpoints = Callable[..., Path]


def with_head(source: Path, folder: Path, head: Tensor | None, **options: int) -> Path:
    """Copy a checkpoint and add an output head; None adds a copy of the embedding.

    With the option `shards` there are two files, the head in the second.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].clone() if head is None else head
    if not options.get("shards"):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    names = {"a.safetensors": [name for name in tensors if name != HEAD], "b.safetensors": [HEAD]}
    for file, own in names.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, own in names.items() for name in own},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "smollm3"])
def test_an_untied_head_is_used_despite_the_config(
    family: str, shards: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    tied = checkpoint(family, tie_word_embeddings=True)
    head = torch.randn(101, 32, generator=torch.Generator().manual_seed(7))
    folder = with_head(tied, tmp_path / "model", head, shards=shards)
    model = load_model(folder, TensorParallelGroup())
    assert torch.equal(model.head.weight.values, head)
    tokens = random_tokens(20)
    torch.testing.assert_close(
        all_logits(model, tokens), reference_logits(folder, tokens), atol=1e-4, rtol=1e-4
    )
    # a plan counts the head
    config = ModelConfig.from_name(str(folder))
    assert not config.tied
    assert config == ModelConfig.from_pretrained(folder)
    assert 4 * parameter_count(config, 1) == parameter_bytes(model)


def test_one_different_element_unties_the_head(checkpoint: Checkpoints, tmp_path: Path) -> None:
    tied = checkpoint(tie_word_embeddings=True)
    head = load_file(tied / "model.safetensors")[EMBEDDING]
    head[-1, -1] += 1
    assert not ModelConfig.from_name(str(with_head(tied, tmp_path / "model", head))).tied


@pytest.mark.parametrize("shards", [0, 2])
def test_a_copy_of_the_embedding_stays_tied(
    shards: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    tied = checkpoint(tie_word_embeddings=True)
    folder = with_head(tied, tmp_path / "model", None, shards=shards)
    assert ModelConfig.from_name(str(folder)) == ModelConfig.from_pretrained(tied)
    model = load_model(folder, TensorParallelGroup())
    assert model.head is model.embed


def test_a_head_of_another_size_is_rejected(checkpoint: Checkpoints, tmp_path: Path) -> None:
    tied = checkpoint(tie_word_embeddings=True)
    folder = with_head(tied, tmp_path / "model", torch.zeros(100, 32))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \(100, 32\)"):
        load_model(folder, TensorParallelGroup())


def test_with_incomplete_files_the_config_decides(checkpoint: Checkpoints, tmp_path: Path) -> None:
    tied = checkpoint(tie_word_embeddings=True)
    folder = with_head(tied, tmp_path / "model", torch.zeros(101, 32), shards=2)
    assert not ModelConfig.from_name(str(folder)).tied
    content = (folder / "b.safetensors").read_bytes()
    for broken in (content[:4], content[:-1], content[:8] + b"{}", b"\xff" * 100):
        (folder / "b.safetensors").write_bytes(broken)
        assert ModelConfig.from_name(str(folder)).tied
    (folder / "b.safetensors").unlink()
    assert ModelConfig.from_name(str(folder)).tied


def test_headers_match_the_safetensors_library(checkpoint: Checkpoints) -> None:
    folder = checkpoint(dtype=torch.bfloat16, max_shard_size="10KB")
    stored = stored_tensors(folder)
    expected = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        info = stored[name]
        assert (info.dtype, info.shape) == ("BF16", tuple(tensor.shape))
        content = info.path.read_bytes()[info.start : info.start + info.nbytes]
        assert content == tensor.view(torch.uint8).numpy().tobytes()


def test_a_file_beside_an_index_that_does_not_list_it(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """transformers would load the single file, vLLM those of the index."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(max_shard_size="10KB"), folder)
    shutil.copy(checkpoint(seed=1) / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match="Remove the one that does not belong to the model"):
        load_model(folder, TensorParallelGroup())


def test_a_plan_rejects_weights_of_unknown_types(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A leftover quantisation config does not matter if no weights are quantised."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    ModelConfig.from_name(str(folder))
    load_model(folder, TensorParallelGroup())
    (folder / "hf_quant_config.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 4, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"/.*/.*up_proj\.weight is I32; only BF16, F16, F32"):
        ModelConfig.from_name(str(folder))


def test_an_adapter_alone_is_rejected(checkpoint: Checkpoints, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"holds an adapter .* merge it into that model"):
        load_model(tmp_path, TensorParallelGroup())
    shutil.copy(checkpoint() / "config.json", tmp_path)  # trainers write it as well
    with pytest.raises(CheckpointError, match="holds only the weights of an adapter"):
        load_model(tmp_path, TensorParallelGroup())
