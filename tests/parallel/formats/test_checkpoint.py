"""Broken and unsupported checkpoints are rejected in one line that says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.checkpoint import SafetensorsCheckpoint
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.models import edit_weights, long_rope

Copy = Callable[..., Path]


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Copy:
    """A function that returns a copy of a checkpoint, for a test to break."""

    def get(**arguments: Any) -> Path:
        return Path(shutil.copytree(checkpoint(**arguments), tmp_path / "model"))

    return get


def edit_config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def assert_rejected(
    folder: Path, error: type[Exception], *parts: str, group: TensorParallelGroup | None = None
) -> None:
    """Assert that loading raises `error` with a one-line message containing all `parts`."""
    with pytest.raises(error) as caught:
        load_model(folder, group or TensorParallelGroup())
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_no_weights(copy: Copy) -> None:
    folder = copy()
    (folder / "model.safetensors").unlink()
    assert_rejected(
        folder,
        CheckpointError,
        str(folder),
        "has no weights: model.safetensors (or its index) is missing",
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights(copy: Copy, name: str) -> None:
    folder = copy()
    (folder / "model.safetensors").rename(folder / name)
    assert_rejected(folder, CheckpointError, "has only pickle weights", "save_pretrained")


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file(copy: Copy, size: int) -> None:
    path = copy() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_rejected(
        path.parent,
        CheckpointError,
        str(path),
        "is not a complete safetensors file",
        "Fetch it again",
    )


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor(copy: Copy, name: str) -> None:
    folder = edit_weights(copy(), lambda tensors: tensors.pop(name))
    assert_rejected(
        folder, CheckpointError, f"tensor {name} is missing; the checkpoint has 29 tensors"
    )


@pytest.mark.parametrize("vocab", [101, 2001])
def test_a_missing_embedding(copy: Copy, vocab: int) -> None:
    """The error names it even if it holds most of the weights.

    A draft for an older version may lack it, to share the target's, as declared by a key of its
    config that is now unknown and ignored.
    """
    folder = copy(vocab_size=vocab, tie_word_embeddings=True)
    edit_weights(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    edit_config(folder, tierforce={"borrows": ["embed_tokens", "lm_head"]})
    assert_rejected(
        folder,
        CheckpointError,
        "tensor model.embed_tokens.weight is missing; the checkpoint has 28 tensors",
    )


def test_a_missing_bias(copy: Copy) -> None:
    folder = edit_config(copy(), attention_bias=True)
    assert_rejected(folder, CheckpointError, "model.layers.0.self_attn.q_proj.bias is missing")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight"]
)
def test_a_wrong_shape(copy: Copy, name: str) -> None:
    folder = edit_weights(copy(), lambda tensors: tensors.update({name: torch.zeros(7, 32)}))
    assert_rejected(
        folder,
        CheckpointError,
        f"model.safetensors: tensor {name} has shape (7, 32), but config.json implies (",
    )


def test_unsupported_weight_dtype(copy: Copy) -> None:
    folder = edit_weights(
        copy(),
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
    )
    assert_rejected(
        folder,
        CheckpointError,
        "tensor model.norm.weight is I8; only BF16, F16, F32 weights are supported",
    )


def test_a_missing_shard(copy: Copy) -> None:
    folder = copy(max_shard_size="10KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    assert_rejected(folder, CheckpointError, f"1 weight files are missing, first {shards[1].name}")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}', '{"weight_map": {"a": 1}}'],
)
def test_a_broken_index(copy: Copy, content: str) -> None:
    folder = copy(max_shard_size="10KB")
    (folder / "model.safetensors.index.json").write_text(content)
    assert_rejected(
        folder,
        CheckpointError,
        "model.safetensors.index.json is not a readable weight index",
        "Fetch it again",
    )


def test_an_index_that_omits_a_tensor(copy: Copy) -> None:
    folder = copy(max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    model = load_model(folder, TensorParallelGroup())  # reads all listed files
    assert (model.norm.weight != 0).all()


def test_a_tensor_in_two_files(copy: Copy) -> None:
    folder = copy(max_shard_size="10KB")
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: torch.zeros_like(tensor)}, second)
    assert_rejected(folder, CheckpointError, f"{name} is in {first.name} and in {second.name}")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_that_points_outside_its_folder(copy: Copy, name: str) -> None:
    folder = copy(max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    assert_rejected(folder, CheckpointError, f"names {name}, which lies outside its folder")


def test_a_git_lfs_pointer(copy: Copy) -> None:
    folder = copy()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    assert_rejected(folder, CheckpointError, "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": 10**5}, {"vocab_size": 10**11}, {"intermediate_size": 10**9}],
    ids=str,
)
def test_a_config_of_implausible_size_allocates_no_memory(
    copy: Copy, fields: dict[str, int]
) -> None:
    folder = edit_config(copy(), **fields)
    assert_rejected(folder, CheckpointError, "config.json describes", "do not belong together")


def test_a_config_without_heads(copy: Copy) -> None:
    folder = edit_config(copy(), num_attention_heads=0, num_key_value_heads=0)
    assert_rejected(folder, ConfigError, "heads = 0; it must be a whole number of at least 1")


def test_a_file_that_breaks_after_it_was_opened(copy: Copy) -> None:
    folder = copy()
    tensor = SafetensorsCheckpoint(folder).tensor("model.norm.weight", (32,))
    (folder / "model.safetensors").write_bytes(b"gone")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor model\.norm\.weight cannot be read"
    ):
        tensor[:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "config.json cannot be read"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json cannot be read"),
        ("7", "config.json cannot be read"),
        ("{}", "model_type None is not supported; supported are"),
        ('{"model_type": "lama"}', "model_type 'lama' is not supported; supported are"),
        ("layers", "layers = 'many'; it must be a whole number"),
    ],
)
def test_a_broken_config(copy: Copy, content: str, reason: str) -> None:
    folder = copy()
    if content == "layers":
        content = json.dumps(
            {**json.loads((folder / "config.json").read_text()), "num_hidden_layers": "many"}
        )
    (folder / "config.json").write_text(content)
    assert_rejected(folder, ConfigError, reason)
    (folder / "config.json").unlink()
    assert_rejected(folder, ConfigError, f"{folder} has no config.json")


def test_a_config_without_required_fields(copy: Copy) -> None:
    """transformers would fill in Llama-2-7B's values."""
    folder = copy()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 99}'
    )
    assert_rejected(
        folder,
        ConfigError,
        "config.json lacks hidden_size, num_attention_heads, intermediate_size: it does not say",
    )


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "family": (
        {"model_type": "gpt2"},
        "model_type 'gpt2' is not supported; supported are llama, mistral, ministral",
    ),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    "longrope": (
        {"rope_parameters": long_rope(6, original_max_position_embeddings=64)},
        "RoPE type 'longrope' needs short_factor, a list of 4 numbers above 0, found [1.0, 1.1",
    ),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 key/value heads"),
    "nothing": ({"num_hidden_layers": 0}, "layers = 0; it must be a whole number of at least 1"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models(copy: Copy, name: str) -> None:
    fields, message = UNSUPPORTED[name]
    assert_rejected(edit_config(copy(), **fields), ConfigError, message)


def test_sliding_windows(copy: Copy) -> None:
    folder = edit_config(copy(), sliding_window=64)
    assert_rejected(folder, ConfigError, "sliding-window attention (sliding_window = 64, of 512")
    edit_config(folder, sliding_window=512)
    load_model(folder, TensorParallelGroup())  # as long as the context, so without effect


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_than_kv_heads(copy: Copy, ranks: int) -> None:
    folder = copy()
    assert_rejected(
        folder,
        ConfigError,
        f"2 key/value heads cannot be split over {ranks} ranks",
        group=TensorParallelGroup(0, ranks),
    )


def test_default_dtypes(checkpoint: Callable[..., Path], copy: Copy) -> None:
    half = checkpoint(dtype=torch.float16)
    # float16 is converted to float32 on a CPU, without rounding
    assert load_model(half, TensorParallelGroup()).embed.weight.dtype == torch.float32
    assert load_model(half, TensorParallelGroup(), "bfloat16").embed.weight.dtype == torch.bfloat16
    assert (
        load_model(checkpoint(dtype=torch.bfloat16), TensorParallelGroup()).embed.weight.dtype
        == torch.bfloat16
    )
    no_dtype = copy(dtype=torch.bfloat16)
    path = no_dtype / "config.json"
    path.write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads(path.read_text()).items()
                if "dtype" not in key
            }
        )
    )
    assert ModelConfig.from_pretrained(no_dtype).dtype is None
    # the default is the dtype of the tensors
    assert load_model(no_dtype, TensorParallelGroup()).embed.weight.dtype == torch.bfloat16
