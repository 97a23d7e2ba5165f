"""The number of positions: configs count either those of the training or the scaled ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.config.model_config import ModelConfig
from parallel.errors import ConfigError
from support.gguf import convert
from support.models import DIMENSIONS, long_rope, rope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CHUNKS = {"chunk_size": 262_144, "original_max_position_embeddings": 262_144}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5 with YaRN": (
        {
            "model_type": "qwen2",
            "max_position_embeddings": 32_768,
            "rope_scaling": rope("yarn", factor=4.0, original_max_position_embeddings=32_768),
        },
        131_072,
    ),
    "Qwen3 with YaRN": (
        {
            "model_type": "qwen3",
            "max_position_embeddings": 40_960,
            "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=32_768),
        },
        131_072,
    ),
    "Yarn-Llama-2-7b-128k": (
        {
            "max_position_embeddings": 131_072,
            "rope_scaling": {
                "type": "yarn",
                "factor": 32.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
            },
        },
        131_072,
    ),
    "YaRN without original positions": (
        {"max_position_embeddings": 131_072, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        131_072,
    ),
    "LLaMA-2-7B-32K": (
        {"max_position_embeddings": 32_768, "rope_scaling": {"type": "linear", "factor": 8.0}},
        32_768,
    ),
    "PoSE-16k": (
        {"max_position_embeddings": 16_384, "rope_parameters": rope("linear", factor=4.0)},
        16_384,
    ),
    "vicuna-7b-16k": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
        16_384,
    ),
    "linear with original positions": (
        {
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 8192,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        32_768,
    ),
    "llama-2-7b-80k": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 10.0}},
        40_960,
    ),
    "InternLM3 parameters": (
        {"max_position_embeddings": 32_768, "rope_scaling": rope("dynamic", factor=6.0)},
        196_608,
    ),
    "Llama-3.1": (
        {"max_position_embeddings": 131_072, "rope_scaling": rope("llama3", factor=8.0, **LLAMA3)},
        131_072,
    ),
    "Llama-3.2": (
        {"max_position_embeddings": 131_072, "rope_scaling": rope("llama3", factor=32.0, **LLAMA3)},
        131_072,
    ),
    "Phi-3, early upload": (
        {
            "model_type": "phi3",
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {**long_rope(8), "rope_type": "su"},
        },
        131_072,
    ),
    "Phi-3, current": (
        {
            "model_type": "phi3",
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {**long_rope(8), "type": "longrope"},
        },
        131_072,
    ),
    "LongRoPE counting training positions": (
        {
            "max_position_embeddings": 4096,
            "rope_scaling": long_rope(8, factor=8.0, original_max_position_embeddings=4096),
        },
        32_768,
    ),
    "Qwen2.5-1M": (
        {
            "model_type": "qwen2",
            "max_position_embeddings": 1_010_000,
            "dual_chunk_attention_config": CHUNKS,
        },
        262_144,
    ),
    "plain": ({"max_position_embeddings": 32_768, "rope_scaling": None}, 32_768),
}


def read(folder: Path, **fields: Any) -> ModelConfig:
    """Return the config as both a plan and an engine read it."""
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **DIMENSIONS, **fields}))
    config = ModelConfig.from_name(str(path))
    assert ModelConfig.from_pretrained(folder) == config
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_context_of_published_configs(name: str, tmp_path: Path) -> None:
    fields, context = PUBLISHED[name]
    config = read(tmp_path, **fields)
    assert config.context_limit == context
    config.check_context(context)
    with pytest.raises(ConfigError, match="is more than the model's"):
        config.check_context(config.max_context + 1)
    assert (config.max_context == context) == (name != "Qwen2.5-1M")


@pytest.mark.parametrize(
    "name", ["LLaMA-2-7B-32K", "YaRN without original positions", "Qwen2.5-1M"]
)
def test_a_note_reports_a_guess(name: str, tmp_path: Path) -> None:
    (note,) = read(tmp_path, **PUBLISHED[name][0]).context_notes()
    assert ("dual chunk attention" if "1M" in name else "is assumed to include that") in note


def test_no_notes_if_the_config_is_explicit(tmp_path: Path) -> None:
    for name in ("Qwen2.5 with YaRN", "vicuna-7b-16k", "Llama-3.1", "Phi-3, current", "plain"):
        assert read(tmp_path, **PUBLISHED[name][0]).context_notes() == []


def test_early_name_of_longrope_is_equivalent(tmp_path: Path) -> None:
    early, current = (
        read(tmp_path, **PUBLISHED[f"Phi-3, {name}"][0]) for name in ("early upload", "current")
    )
    for tokens in (100, 100_000):
        ours, factor = early.inverse_frequencies(tokens)
        theirs, other = current.inverse_frequencies(tokens)
        assert ours.equal(theirs)
        assert factor == other


def test_dual_chunk_attention_allows_more_than_the_default_context(tmp_path: Path) -> None:
    read(tmp_path, **PUBLISHED["Qwen2.5-1M"][0]).check_context(1_000_000)


def test_rope_option_may_repeat_the_scaling_of_the_config(tmp_path: Path) -> None:
    config = read(tmp_path, **PUBLISHED["Qwen2.5 with YaRN"][0])
    assert config.with_rope_scaling("yarn:4") == config
    with pytest.raises(ConfigError, match=r"by RoPE type 'yarn'.*: it has 131072"):
        config.with_rope_scaling("yarn:2")


def test_window_covers_unscaled_positions_and_limits_scaled_ones(tmp_path: Path) -> None:
    fields = {"model_type": "mistral", "max_position_embeddings": 32_768}
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=32_768)
    plain = read(tmp_path, **fields, sliding_window=65_536)
    assert plain.with_rope_scaling("yarn:2").context_limit == 65_536
    with pytest.raises(ConfigError, match="positions; `rope` yarn:2 would extend them"):
        plain.check_context(40_000)
    with pytest.raises(ConfigError, match=r"is more than the model's 32768 positions\.$"):
        plain.check_context(80_000)
    with pytest.raises(ConfigError, match=r"131072 positions, but .* sees at most 65536"):
        plain.with_rope_scaling("yarn:4")
    for window in (32_768, 65_536):
        capped = read(tmp_path, **fields, sliding_window=window, rope_scaling=yarn)
        assert capped.context_limit == capped.max_context == window
        with pytest.raises(ConfigError, match=rf"is more than the model's {window} positions\.$"):
            capped.check_context(window + 1)
    windowed = read(tmp_path, **fields, sliding_window=32_767, rope_scaling=yarn)
    assert windowed.max_context == 131_072
    assert windowed.sliding_window is not None
    assert windowed.sliding_window.tokens == 32_767
    assert (
        read(tmp_path, **fields, sliding_window=None).with_rope_scaling("yarn:4").max_context
        == 131_072
    )


@pytest.mark.parametrize(
    ("positions", "parameters", "context"),
    [
        (32_768, {"factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        (131_072, {"factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
    ],
)
def test_a_gguf_file_with_yarn(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    positions: int,
    parameters: dict[str, Any],
    context: int,
) -> None:
    folder = checkpoint(
        "qwen2", max_position_embeddings=positions, rope_parameters=rope("yarn", **parameters)
    )
    config = ModelConfig.from_name(str(convert(folder, tmp_path / "model.gguf")))
    assert config.context_limit == context == ModelConfig.from_pretrained(folder).context_limit


@pytest.mark.parametrize(("positions", "context"), [(32_768, 32_768), (4096, 32_768)])
def test_a_gguf_file_with_linear_scaling(
    checkpoint: Callable[..., Path], tmp_path: Path, positions: int, context: int
) -> None:
    linear = rope("linear", factor=8.0)
    folder = checkpoint(max_position_embeddings=positions, rope_parameters=linear)
    config = ModelConfig.from_name(str(convert(folder, tmp_path / "model.gguf")))
    assert config.context_limit == context
