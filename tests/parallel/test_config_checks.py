"""Whatever a config.json says, it is a model or one line that names the field and what is right."""

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
INSIDE = ("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings")
INSIDE_YARN = (*INSIDE, "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")


def refusal(folder: Path, fields: dict[str, Any]) -> str | None:
    """Return why a plan refuses a config, None where it takes it.

    Then an engine may still refuse it, by what transformers checks.
    """
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    try:
        config = ModelConfig.from_name(str(path))
    except ConfigError as error:
        text = str(error)
        return text if text.isprintable() and len(text) < 600 else f"Error: {text!r}"
    assert config.context_limit >= 1
    config.context_notes()
    with suppress(ConfigError):
        assert ModelConfig.from_pretrained(folder) == config
    return None


def is_internal(text: str) -> bool:
    """Return whether these are an interpreter's words, of a value that it trips over."""
    words = ("' object", "Error", "operand", "not supported between", "unhashable", "by zero")
    return any(each in text for each in (*words, "index out of"))


@pytest.mark.parametrize(
    "family", slow_except(["llama", "phi3", "smollm3", "qwen3_moe", "granite"], 3)
)
def test_any_value_of_any_field(family: str, tmp_path: Path) -> None:
    for name in FIELDS:
        for value in ANYTHING:
            said = refusal(tmp_path, {"model_type": family, **NEEDED, name: value})
            assert said is None or not is_internal(said), (name, value, said)


@pytest.mark.parametrize(
    "kind", slow_except(["linear", "dynamic", "yarn", "llama3", "longrope"], 2, 4)
)
def test_any_value_of_any_parameter_of_rope(kind: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    names = INSIDE_YARN if kind == "yarn" else INSIDE
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for name in {*names, *parameters}:
        for value in ANYTHING:
            rope = {**parameters, name: value}
            said = refusal(tmp_path, {"model_type": "llama", **NEEDED, "rope_scaling": rope})
            if said is not None:
                assert not is_internal(said), (name, value, said)
                continue
            config = ModelConfig.from_name(str(tmp_path / "config.json"))
            for tokens in (1, config.context_limit):  # nothing is divided by 0, or overflows
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
        ({"head_dim": 15}, "RoPE turns pairs of dimensions, and the model's heads have 15"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types for 1 layers, and num_hidden_layers = 2",
        ),
        ({"dtype": 16}, "dtype = 16; it must be the name of a number format"),
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
def test_what_is_wrong_is_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, {"model_type": "llama", **NEEDED, **fields})
    assert said is not None
    assert words in said
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert str(caught.value) == said


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
def test_what_a_family_does_not_read_is_no_reason(fields: dict[str, Any], tmp_path: Path) -> None:
    assert refusal(tmp_path, {"model_type": "llama", **NEEDED}) is None
    plain = ModelConfig.from_pretrained(tmp_path)
    assert refusal(tmp_path, {"model_type": "llama", **NEEDED, **fields}) is None
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
def test_what_says_nothing_is_as_good_as_absent(fields: dict[str, Any], tmp_path: Path) -> None:
    assert refusal(tmp_path, {**NEEDED, **fields}) is None
    ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["auto", "bf16", "int8", "a" * 5000])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_dtype_that_is_not_known_may_be_chosen(
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


def test_sizes_whose_product_no_integer_holds(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """torch would print a C++ stack for them."""
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
def test_a_file_beyond_bounds(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises((OSError, ValueError), match=words):
        read_json(path)
    with pytest.raises(ConfigError, match="cannot be read as a model's config"):
        ModelConfig.from_name(str(path))
