"""What is made of a GGUF file for peers that cannot take it has the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType

from bench.peers.gguf import dequantised, hugging_face_folder, kernels
from parallel.config.model_config import ModelConfig
from parallel.formats.gguf_header import read_header
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.gguf import convert

WHOLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # blocks of 32 numbers


def weights(path: Path, dtype: str) -> list[torch.Tensor]:
    return list(load_model(path, TensorParallelGroup(), dtype).parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [dequantised, hugging_face_folder])
def test_numbers(
    checkpoint: Callable[..., Path], tmp_path: Path, make: Callable[..., Path], dtype: str
) -> None:
    file = convert(
        checkpoint(**WHOLE),
        tmp_path / "model.gguf",
        GGMLQuantizationType.Q4_1,
    )
    made = make(file, dtype, tmp_path / "kept")
    config, wanted = ModelConfig.from_pretrained(made), ModelConfig.from_pretrained(file)
    assert (config.rope, config.kv_heads) == (wanted.rope, wanted.kv_heads)
    for one, other in zip(weights(made, dtype), weights(file, dtype), strict=True):
        assert torch.equal(one, other)
    stamp = made.stat().st_mtime_ns
    assert make(file, dtype, tmp_path / "kept") == made
    assert made.stat().st_mtime_ns == stamp  # made once
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_metadata_is_the_files_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    file = convert(
        checkpoint(**WHOLE),
        tmp_path / "model.gguf",
        GGMLQuantizationType.Q8_0,
    )
    made = dequantised(file, "bfloat16", tmp_path)
    assert (kernels(file), kernels(made)) == ("Q8_0", "BF16")
    assert read_header(made).metadata == read_header(file).metadata


def test_a_folder_is_taken_as_it_is(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint()
    assert hugging_face_folder(folder, "float32", tmp_path / "kept") == folder
    assert not (tmp_path / "kept").exists()
