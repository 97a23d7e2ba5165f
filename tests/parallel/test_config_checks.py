"""Any config.json is either valid or fails with one line naming the field and a valid value."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import TierForceError
from offload.regular_files import read_json
from parallel.config.model_config import ModelConfig
from parallel.errors import ConfigError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.models import DIMENSIONS
from support.slow import slow_except

NEEDED: dict[str, Any] = {
    **DIMENSIONS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "sliding_window": None,
}
FIELDS = (
    *NEEDED,
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "hidden_act",
    "layer_types",
    "use_sliding_window",
    "no_rope_layers",
    "no_rope_layer_interval",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "dual_chunk_attention_config",
    "quantization",
    "text_config",
    "auto_map",
)
HUGE = 10**400
ANYTHING: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 7, 64, -1, 10**5, 10**12, HUGE, -HUGE),
    *(0.0, 0.5, 64.0, -2.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *("", "8", "a" * 5000, [], [1], [None], [[]], [HUGE], ["a", "b"], {}, {"a": 1}),
)
ROPE_PARAMETERS = ("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings")
YARN_PARAMETERS = (
    *ROPE_PARAMETERS,
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
)


def config_error(folder: Path, fields: dict[str, Any]) -> str | None:
    """Return a plan's error message for a config, None if the config is valid.

    An engine may still reject a valid config, because of checks in transformers.
    """
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    try:
        config = ModelConfig.from_name(str(path))
    except ConfigError as error:
        message = str(error)
        is_clean = message.isprintable() and len(message) < 600
        return message if is_clean else f"Error: {message!r}"
    assert config.context_limit >= 1
    config.context_notes()
    with suppress(ConfigError):
        assert ModelConfig.from_pretrained(folder) == config
    return None


def is_internal(message: str) -> bool:
    """Return whether a message is one of Python's own, about an operation on a bad value."""
    words = ("' object", "Error", "operand", "not supported between", "unhashable", "by zero")
    return any(word in message for word in (*words, "index out of"))


@pytest.mark.parametrize(
    "family", slow_except(["llama", "phi3", "smollm3", "qwen3_moe", "granite"], 3)
)
def test_no_value_of_a_field_causes_internal_errors(family: str, tmp_path: Path) -> None:
    for name in FIELDS:
        for value in ANYTHING:
            error = config_error(tmp_path, {"model_type": family, **NEEDED, name: value})
            assert error is None or not is_internal(error), (name, value, error)


@pytest.mark.parametrize(
    "kind", slow_except(["linear", "dynamic", "yarn", "llama3", "longrope"], 2, 4)
)
def test_no_value_of_a_rope_parameter_causes_internal_errors(kind: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    names = YARN_PARAMETERS if kind == "yarn" else ROPE_PARAMETERS
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for name in {*names, *parameters}:
        for value in ANYTHING:
            rope = {**parameters, name: value}
            fields = {"model_type": "llama", **NEEDED, "rope_scaling": rope}
            error = config_error(tmp_path, fields)
            if error is not None:
                assert not is_internal(error), (name, value, error)
                continue
            config = ModelConfig.from_name(str(tmp_path / "config.json"))
            for tokens in (1, config.context_limit):  # no overflow, no division by 0
                frequencies, factor = config.inverse_frequencies(tokens)
                assert frequencies.isfinite().all()
                assert math.isfinite(factor)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 1e300}, "hidden_size = 1e+300; it must be a whole number of at least 1"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True; it must be a whole number"),
        ({"num_hidden_layers": 10**8}, "of at least 1 and at most 100,000"),
        (
            {"rope_theta": HUGE},
            "needs rope_theta above 0, a number of at least 2 and at most 1e+15",
        ),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "num_attention_heads = 7, and no"),
        ({"head_dim": 0}, "head_dim = 0; it must be a whole number of at least 1"),
        ({"head_dim": 15}, "RoPE rotates pairs of dimensions, and the model's heads have 15"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types for 1 layers, and num_hidden_layers = 2",
        ),
        ({"dtype": 16}, "dtype = 16; it must be the name of a dtype"),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": None},
            "num_experts_per_tok = None; it must be a whole number of at least 1",
        ),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 0},
            "moe_intermediate_size = 0; it must be a whole number of at least 1",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step = 0; it must"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers = 1; it must be a li"),
        ({"model_type": "granite", "logits_scaling": None}, "logits_scaling = None; it must be"),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval = 0; it must be a whole number of at least 1",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers for 1 layers, and num"),
    ],
    ids=str,
)
def test_error_names_the_field(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    error = config_error(tmp_path, {"model_type": "llama", **NEEDED, **fields})
    assert error is not None
    assert words in error
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts_per_tok": 0},
        {"num_experts_per_tok": None},
        {"moe_intermediate_size": 0},
        {"moe_intermediate_size": None},
        {"num_local_experts": -1},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": "none"},
        {"logits_scaling": None},
        {"embedding_multiplier": None},
        {"no_rope_layer_interval": None},
        {"no_rope_layer_interval": 0},
        {"no_rope_layers": []},
        {"no_rope_layers": [1]},
        {"layer_types": []},
        {"sliding_window": False},
        {"dual_chunk_attention_config": {"chunk_size": 100}},
        {"dual_chunk_attention_config": True},
    ],
    ids=str,
)
def test_fields_a_family_does_not_use_are_ignored(fields: dict[str, Any], tmp_path: Path) -> None:
    assert config_error(tmp_path, {"model_type": "llama", **NEEDED}) is None
    plain = ModelConfig.from_pretrained(tmp_path)
    assert config_error(tmp_path, {"model_type": "llama", **NEEDED, **fields}) is None
    assert ModelConfig.from_pretrained(tmp_path) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "smollm3", "no_rope_layers": []},
        {"model_type": "smollm3", "layer_types": []},
        {"model_type": "mistral", "sliding_window": False},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": False},
    ],
    ids=str,
)
def test_empty_fields_count_as_absent(fields: dict[str, Any], tmp_path: Path) -> None:
    assert config_error(tmp_path, {**NEEDED, **fields}) is None
    ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["auto", "bf16", "int8", "a" * 5000])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_unknown_dtype_requires_the_dtype_option(
    checkpoint: Callable[..., Path], tmp_path: Path, field: str, name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, field: name}))
    with pytest.raises(TierForceError, match=f"says dtype {name[:40]}, which.*use `dtype` bf"):
        load_model(folder, TensorParallelGroup())
    assert load_model(folder, TensorParallelGroup(), "float32").norm.weight.dtype == torch.float32


def test_sizes_with_overflowing_products_are_rejected(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """torch would print a C++ stack trace for them."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    config = json.loads((folder / "config.json").read_text())
    for fields in (
        {"hidden_size": 4 * 10**11, "head_dim": 8},
        {"vocab_size": 10**12, "hidden_size": 4 * 10**11, "head_dim": 8},
        {"head_dim": 10**12},
        {"intermediate_size": 10**12},
        {"hidden_size": 10**12, "num_attention_heads": 10**12, "head_dim": 8},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(TierForceError, match="do not belong together: fetch both again"):
            load_model(folder, TensorParallelGroup())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a": ' * 100_000, "it is nested too deeply"),
        (" " * (9 << 20), "it has more than 8,388,608 bytes"),
        ('{"model_type": ' + "1" * 5000 + "}", "integer"),
        ("\udcff", "utf-8"),
    ],
    ids=["lists", "objects", "long", "digits", "bytes"],
)
def test_malformed_files_are_rejected(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises((OSError, ValueError), match=words):
        read_json(path)
    with pytest.raises(ConfigError, match="cannot be read as a model's config"):
        ModelConfig.from_name(str(path))
