"""Invalid metadata and tensors of GGUF files: one line names the key and a valid value."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from decoding.models.loading import load_tokenizer
from offload.errors import TierForceError
from offload.layout import SlidingWindow
from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf.header import read_header
from parallel.formats.gguf.tensors import TYPES
from parallel.model.loading import load_model, resolve
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO
from support.gguf import Kind, convert
from support.gguf_bytes import ABSENT, rewrite_header
from support.models import rope
from support.slow import slow_except

HUGE = 2**63
ANYTHING = (0, 1, 3, HUGE, -1, True, 0.5, 1e300, math.nan, math.inf, "", "text", [], [1], ["a"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file with a tokenizer, converted from the demo's draft."""
    return convert(DEMO / "draft", tmp_path_factory.mktemp("gguf") / "whole.gguf", Kind.Q8_0)


def rejection_message(path: Path) -> str:
    """Return the one-line error for a file, which is the same from a plan and from loading."""
    messages = set()
    for read in (
        lambda: ModelConfig.from_name(str(path)),
        lambda: load_model(path, TensorParallelGroup()),
    ):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            read()
        messages.add(str(caught.value))
    (message,) = messages
    assert message.isprintable()
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.attention.key_length", 0, "key_length = 0; it must be a whole number of at least"),
        ("llama.attention.head_count", 1.5, "head_count = 1.5; it must be a whole number"),
        ("llama.attention.head_count", True, "head_count = True; it must be a whole number"),
        ("llama.attention.head_count", [4, 2], "head_count = [4, 2]; it must be a whole number"),
        ("llama.attention.head_count", "4", "head_count = '4'; it must be a whole number"),
        ("llama.context_length", HUGE, "context_length = 9223372036854775808; it must be"),
        ("llama.embedding_length", -8, "embedding_length = -8; it must be a whole number"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "rms_epsilon = nan; it must be a num"),
        ("llama.rope.freq_base", math.inf, "llama.rope.freq_base = inf; it must be a number of"),
        ("llama.rope.freq_base", "big", "llama.rope.freq_base = 'big'; it must be a number of"),
        ("llama.rope.scaling.type", 2, "llama.rope.scaling.type = 2; it must be a string"),
        ("llama.rope.scaling.finetuned", 1, "finetuned = 1; it must be true or false"),
        ("tokenizer.ggml.tokens", 7, "tokenizer.ggml.tokens = 7; it must be a list of strings"),
        ("tokenizer.ggml.tokens", [1, 2], "tokenizer.ggml.tokens = [1, 2]; it must be a list of"),
        ("tokenizer.ggml.tokens", ["a"] * 3000, "has 3000 tokens (tokenizer.ggml.tokens), but a"),
        ("general.architecture", 7, "architecture 7 is not supported"),
        ("general.architecture", ["llama"], "architecture ['llama'] is not supported"),
        ("llama.feed_forward_length", ABSENT, "its metadata lacks llama.feed_forward_length"),
    ],
    ids=str,
)
def test_metadata_of_wrong_type_or_size(
    whole: Path, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    assert words in rejection_message(rewrite_header(whole, tmp_path / "model.gguf", {key: value}))


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (
            {"family": "gemma3_text"},
            {"gemma3.attention.sliding_window": ABSENT},
            "its metadata lacks gemma3.attention.sliding_window",
        ),
        (
            {"family": "gemma3_text"},
            {
                "gemma3.attention.sliding_window_pattern": [True, False]
            },  # the model has three layers
            "sliding_window_pattern = [True, False]; it must be a whole number",
        ),
        (
            {"family": "qwen2"},
            {"qwen2.attention.sliding_window": 64},
            "(sliding_window = 64, of 512 positions) is not supported in files of architecture q",
        ),
        (
            {"family": "granitemoehybrid"},
            {"granite.rope.scaling.finetuned": False},
            "granite.rope.scaling.finetuned = False; it must be True",
        ),
        (
            {"family": "ministral3"},
            {"mistral3.rope.scaling.type": "none"},
            "has attention.temperature_scale without a rope.scaling.type of yarn",
        ),
        (
            {"family": "granite"},
            {"granite.attention.head_count_kv": [2, 2]},
            "head_count_kv = [2, 2]; it must be a whole number",  # the model has three layers
        ),
        (
            {"family": "gemma4_text"},
            {"gemma4.attention.shared_kv_layers": 1},
            "gemma4.attention.shared_kv_layers = '1', which indicates parts",
        ),
        (
            {"family": "gemma4_text"},
            {"gemma4.attention.sliding_window_pattern": 6},
            "must say of each layer whether it has a window",
        ),
        (
            {"family": "gemma4_text"},
            {"gemma4.attention.head_count_kv": [4, 2, 4]},
            "of [2, 4] in layers of one kind",
        ),
        (
            {"family": "gemma4_text"},
            {"gemma4.rope.dimension_count_swa": 4},
            "dimension_count_swa = 4 for heads of 8 dimensions",
        ),
        (
            {"family": "gpt_oss"},
            {"gpt-oss.attention.sliding_window_pattern": 3},
            "sliding_window_pattern = 3; it must be 2",
        ),
    ],
    ids=[
        *("gemma3", "gemma3-pattern", "qwen2", "granite4", "ministral3", "granite"),
        *("gemma4-shared", "gemma4-pattern", "gemma4-heads", "gemma4-rope", "gpt-oss"),
    ],
)
def test_models_that_would_be_read_as_others(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    options: dict[str, Any],
    changes: dict[str, Any],
    words: str,
) -> None:
    path = convert(checkpoint(**options), tmp_path / "whole.gguf")
    assert words in rejection_message(rewrite_header(path, tmp_path / "model.gguf", changes))


@pytest.mark.parametrize(
    ("options", "changes", "window", "layers"),
    [
        # older files leave fields out
        (
            {"family": "phi3", "max_position_embeddings": 4096},
            {"phi3.attention.sliding_window": ABSENT},
            2047,
            {0, 1, 2, 3, 4},
        ),
        (
            {"family": "exaone4"},
            {"exaone4.attention.sliding_window": 20},
            20,
            {0, 1, 2, 4},
        ),
        (
            {"family": "gemma3_text", "query_pre_attn_scalar": 12},
            {
                "gemma3.attention.sliding_window_pattern": ABSENT,
                "gemma3.rope.freq_base_swa": ABSENT,
            },
            20,
            {0, 1, 2, 3, 4},
        ),
        (
            {"family": "gemma3_text", "query_pre_attn_scalar": 12},
            {"gemma3.attention.sliding_window_pattern": 2},
            20,
            {0, 2, 4},
        ),
    ],
    ids=["phi3", "exaone4", "gemma3", "gemma3-number"],
)
def test_windows_of_layers(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    options: dict[str, Any],
    changes: dict[str, Any],
    window: int,
    layers: set[int],
) -> None:
    whole = checkpoint(**options, num_hidden_layers=5, layer_types=["full_attention"] * 5)
    path = rewrite_header(convert(whole, tmp_path / "whole.gguf"), tmp_path / "x.gguf", changes)
    config = ModelConfig.from_name(str(path))
    assert config.sliding_window == SlidingWindow(window, frozenset(layers))
    assert config == ModelConfig.from_pretrained(path)
    if config.windowed_rope is not None:
        assert config.windowed_rope["rope_theta"] == 10_000.0
    assert config.nope_layers == ({3} if options["family"] == "exaone4" else set())


def test_heads_that_do_not_divide(whole: Path, tmp_path: Path) -> None:
    changes = {
        f"llama.{name}": ABSENT for name in ("attention.key_length", "attention.value_length")
    }
    changes |= {"llama.attention.head_count": 7, "llama.rope.dimension_count": ABSENT}
    message = rejection_message(rewrite_header(whole, tmp_path / "model.gguf", changes))
    assert "does not divide into attention.head_count = 7, and no attention.key_length" in message


@pytest.mark.parametrize("part", slow_except([0, 1, 2]))
def test_invalid_metadata_raise_only_clean_errors(part: int, whole: Path, tmp_path: Path) -> None:
    """Every key with each of many values either loads or raises a one-line error."""
    path, lines = tmp_path / "model.gguf", set()
    for key in list(read_header(whole).metadata)[part::3]:
        for value in (*ANYTHING, ABSENT):
            rewrite_header(whole, path, {key: value})
            try:
                ModelConfig.from_name(str(path))
                load_tokenizer(path)("Some text.")
            except TierForceError as error:
                lines.add(str(error))
    assert len(lines) > 33
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    internal = ("object is not", "Error", "not supported between", "unhashable", "zero")
    assert not [line for line in lines if any(words in line for words in internal)]


def test_every_unsupported_field_is_named(whole: Path, tmp_path: Path) -> None:
    parts = {"llama.expert_group_count": 8, "llama.moe_step": 2, "llama.attn_soft_cap": 50.0}
    message = rejection_message(rewrite_header(whole, tmp_path / "model.gguf", parts))
    assert "llama.expert_group_count = '8', llama.moe_step = '2', llama.attn_soft_cap" in message


@pytest.mark.parametrize("shift", [0, 32, -32])
def test_tensors_that_overlap(whole: Path, tmp_path: Path, shift: int) -> None:
    header = read_header(whole)
    starts = {name: info.start - header.data_start for name, info in header.tensors.items()}
    name, other = "blk.1.ffn_up.weight", "blk.1.ffn_gate.weight"
    path = rewrite_header(whole, tmp_path / "model.gguf", offsets={name: starts[other] + shift})
    assert "overlap: the file is broken" in rejection_message(path)


def test_an_unaligned_tensor(whole: Path, tmp_path: Path) -> None:
    path = rewrite_header(whole, tmp_path / "model.gguf", offsets={"output_norm.weight": 2**40 + 8})
    assert "places tensor output_norm.weight at 1099511627784" in rejection_message(path)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_invalid_frequency_factors(
    checkpoint: Callable[..., Path], tmp_path: Path, factor: float
) -> None:
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters |= {"factor": 8.0, "original_max_position_embeddings": 64}
    path = convert(
        checkpoint(rope_parameters=rope("llama3", **parameters)), tmp_path / "model.gguf"
    )
    offset = read_header(path).tensors["rope_freqs.weight"].start
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = struct.pack("<f", factor)
    path.write_bytes(content)
    assert "rope_freqs.weight has numbers that are not positive" in rejection_message(path)


def test_a_plan_rejects_unsupported_tensor_types(whole: Path, tmp_path: Path) -> None:
    for kind in (GGMLQuantizationType.IQ1_S, GGMLQuantizationType.TQ1_0):
        content = bytearray(whole.read_bytes())
        offset = content.index(b"blk.1.ffn_gate.weight") + len("blk.1.ffn_gate.weight") + 4 + 16
        content[offset : offset + 4] = struct.pack("<I", kind)
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        assert (
            f"blk.1.ffn_gate.weight is of type {kind.name}; supported are F32"
            in rejection_message(path)
        )


def test_types_match_ggml() -> None:
    for number, kind in TYPES.items():
        known = GGMLQuantizationType(number)
        assert (kind.name, kind.numbers, kind.nbytes) == (known.name, *GGML_QUANT_SIZES[known])


def test_an_endless_header_allocates_no_memory(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # a sparse file
        file.write(start + struct.pack("<IIQ", 9, 0, 1 << 32))
    assert "has a list of 4,294,967,296 elements in its metadata" in rejection_message(path)
    with path.open("r+b") as file:
        file.write(start + struct.pack("<IQ", 8, 1 << 32))
    assert "has a header of more than 134,217,728 bytes" in rejection_message(path)


@pytest.mark.parametrize("name", ["sha256-8daa9615", "model.bin", "model"])
def test_a_file_with_another_suffix_is_recognised_by_its_first_bytes(
    whole: Path, tmp_path: Path, name: str
) -> None:
    """Ollama stores its files under such names."""
    path = tmp_path / name
    path.write_bytes(whole.read_bytes())
    assert resolve(str(path), TensorParallelGroup()) == path
    assert ModelConfig.from_name(str(path)) == ModelConfig.from_name(str(whole))
    ours, theirs = load_model(path, TensorParallelGroup()), load_model(whole, TensorParallelGroup())
    assert torch.equal(ours.embed.weight.values, theirs.embed.weight.values)
    assert load_tokenizer(path).get_vocab() == load_tokenizer(whole).get_vocab()


def test_a_file_with_other_first_bytes_is_rejected(tmp_path: Path) -> None:
    for content in (b"", b"GGU", b"GGML\x03\0\0\0", b"\x80\x02pickle"):
        path = tmp_path / "sha256-1"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is neither a GGUF file nor a config"):
            ModelConfig.from_name(str(path))
