"""Conversions of a GGUF file for peers have the same numbers as the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType

from bench.peers.gguf import dequantised_file, hugging_face_folder, kernels
from parallel.config.model_config import ModelConfig
from parallel.formats.gguf.header import read_header
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.gguf import convert

WHOLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # blocks of 32 numbers


def weights(path: Path, dtype: str) -> list[torch.Tensor]:
    return list(load_model(path, TensorParallelGroup(), dtype).parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("convert_for_peer", [dequantised_file, hugging_face_folder])
def test_converted_weights_are_equal(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    convert_for_peer: Callable[..., Path],
    dtype: str,
) -> None:
    file = convert(
        checkpoint(**WHOLE),
        tmp_path / "model.gguf",
        GGMLQuantizationType.Q4_1,
    )
    scratch = tmp_path / "scratch"
    converted = convert_for_peer(file, dtype, scratch)
    config, expected = ModelConfig.from_pretrained(converted), ModelConfig.from_pretrained(file)
    assert (config.rope, config.kv_heads) == (expected.rope, expected.kv_heads)
    for weight, original in zip(weights(converted, dtype), weights(file, dtype), strict=True):
        assert torch.equal(weight, original)
    modified = converted.stat().st_mtime_ns
    assert convert_for_peer(file, dtype, scratch) == converted
    assert converted.stat().st_mtime_ns == modified  # converted once
    assert len(list(scratch.iterdir())) == 1


def test_converted_file_has_the_same_metadata(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    file = convert(
        checkpoint(**WHOLE),
        tmp_path / "model.gguf",
        GGMLQuantizationType.Q8_0,
    )
    converted = dequantised_file(file, "bfloat16", tmp_path)
    assert (kernels(file), kernels(converted)) == ("Q8_0", "BF16")
    assert read_header(converted).metadata == read_header(file).metadata


def test_a_folder_is_not_converted(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint()
    assert hugging_face_folder(folder, "float32", tmp_path / "scratch") == folder
    assert not (tmp_path / "scratch").exists()
