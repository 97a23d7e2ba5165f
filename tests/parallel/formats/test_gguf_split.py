"""A split GGUF model is read by its first part, and is the model that one file would be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind

from decoding.app.batch.job import model_digest
from decoding.prefix_cache.fingerprint import WeightDigests
from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError
from parallel.formats.gguf.header import part_files, read_header
from parallel.model.loading import load_model, resolve
from parallel.ranks.process_group import TensorParallelGroup
from support.gguf import convert
from support.loading import all_logits
from support.models import random_tokens


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(hidden_size=64, intermediate_size=96)


@pytest.fixture
def first(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "split" / "model.gguf"
    path.parent.mkdir()
    return convert(folder, path, Kind.Q4_0, part_tensors=7)


def test_a_split_model_is_the_model_of_one_file(folder: Path, first: Path, tmp_path: Path) -> None:
    whole = convert(folder, tmp_path / "whole.gguf", Kind.Q4_0)
    parts = part_files(first)
    assert len(parts) > 2
    assert read_header(first).tensors.keys() == read_header(whole).tensors.keys()
    config = ModelConfig.from_name(str(first), packed=True)
    assert config == ModelConfig.from_name(str(whole), packed=True)
    tokens = random_tokens(40)
    expected = all_logits(load_model(whole, TensorParallelGroup(), "float32"), tokens)
    for each in (None, config):
        model = load_model(first, TensorParallelGroup(), "float32", each)
        assert torch.equal(all_logits(model, tokens), expected)


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_name_finds_the_first_part(first: Path, by: str) -> None:
    name = first if by == "file" else first.parent
    assert resolve(str(name), TensorParallelGroup()) == first


def test_another_part(first: Path) -> None:
    second = part_files(first)[1]
    with pytest.raises(
        CheckpointError, match=f"is a part of a split model: name its first, {first}"
    ):
        resolve(str(second), TensorParallelGroup())


def test_a_missing_part(first: Path) -> None:
    parts = part_files(first)
    parts[-1].unlink()
    message = f"1 of the model's {len(parts)} parts are missing, first {parts[-1].name}"
    for name in (first, first.parent):
        with pytest.raises(CheckpointError, match=message):
            ModelConfig.from_name(str(name))


def test_a_part_that_is_cut_short(first: Path) -> None:
    last = part_files(first)[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{last.name} ends before tensor .* does"):
        load_model(first, TensorParallelGroup(), "float32")


def test_a_part_of_another_model(first: Path) -> None:
    parts = part_files(first)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=f"{parts[1].name} does not belong to .*{first.name}"):
        read_header(first)


def test_a_renamed_part(first: Path) -> None:
    renamed = first.rename(first.with_name("model.gguf"))
    with pytest.raises(
        CheckpointError, match=r"is part of a split model of \d files, but its name"
    ):
        read_header(renamed)


def test_every_part_counts_in_digests(first: Path, tmp_path: Path) -> None:
    parts = part_files(first)
    before = WeightDigests.compute(first, tmp_path).digests
    assert list(before) == [part.name for part in parts]
    job = model_digest(first)
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1
    parts[-1].write_bytes(content)
    assert WeightDigests.compute(first, tmp_path).digests != before
    assert model_digest(first) != job
