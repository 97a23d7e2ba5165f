"""A GGUF file equals the model it was converted from: config, tensor slices and logits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import parallel.formats.gguf.checkpoint
import support.gguf
from parallel.config.model_config import ModelConfig
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.gguf.checkpoint import KINDS, GgufCheckpoint
from parallel.formats.gguf.families import MULTIPLIERS
from parallel.formats.gguf.header import read_header
from parallel.formats.gguf.metadata import config_fields
from parallel.model.loading import load_model, open_checkpoint, parameter_bytes, resolve
from parallel.ranks.process_group import TensorParallelGroup
from support.families import OTHERS
from support.gguf import convert
from support.gguf_bytes import rewrite_header
from support.loading import all_logits, assert_same_parameters, load_and_watch
from support.models import WIDE, random_tokens, reference_logits, rope
from support.predictors import with_predictor
from support.ranks import run_ranks
from support.slow import slow_except

Checkpoints = Callable[..., Path]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
SLICES: tuple[Any, ...] = (
    slice(None),
    slice(0, 0),
    slice(3, 77),
    slice(64, 128),
    slice(200, None),
    (slice(None), slice(128, 256)),
    (slice(None), slice(0, 100)),
    (slice(17, 91), slice(33, 34)),
    (slice(5, 6), slice(250, 256)),
)


@EVERY_KIND
@pytest.mark.parametrize("chunk_elements", [1 << 20, 5000])
def test_slices_equal_those_of_the_whole_tensor(
    checkpoint: Checkpoints, tmp_path: Path, kind: Kind, chunk_elements: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(parallel.formats.gguf.checkpoint, "_CHUNK_ELEMENTS", chunk_elements)
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", kind)
    stored_tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = GgufCheckpoint(path)
    for part, name in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
        stored = stored_tensors[f"blk.1.{part}.weight"]
        whole = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        assert whole.std() > 0.01
        tensor = weights.tensor(f"model.layers.1.{name}.weight", tuple(whole.shape))
        for index in SLICES:
            torch.testing.assert_close(tensor[index], whole[index], rtol=0, atol=0)
    norm = weights.tensor("model.norm.weight", (256,))
    expected = torch.from_numpy(stored_tensors["output_norm.weight"].data.copy())
    assert torch.equal(norm[:], expected)
    assert torch.equal(norm[7:90], expected[7:90])


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != Kind.NVFP4], ids=lambda kind: kind.name
)
def test_logits_equal_transformers(checkpoint: Checkpoints, tmp_path: Path, kind: Kind) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", kind)
    assert_logits_equal_transformers(path)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q5_0, Kind.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [False, True])
def test_qwen2_logits_equal_transformers(
    checkpoint: Checkpoints, tmp_path: Path, kind: Kind, tied: bool
) -> None:
    options = {**WIDE, "family": "qwen2", "tie_word_embeddings": tied}
    assert_logits_equal_transformers(convert(checkpoint(**options), tmp_path / "model.gguf", kind))


def assert_logits_equal_transformers(path: Path) -> None:
    """Compare a file's float32 logits with those of transformers' GGUF loader."""
    tokens = random_tokens(60)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    assert expected.std() > 0.1
    logits = all_logits(load_model(path, TensorParallelGroup(), "float32"), tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def logits_of(path: Path, group: TensorParallelGroup) -> Tensor:
    return all_logits(load_model(path, group, "float32"), random_tokens(60))


def logits_on_this_rank(path: Path) -> Tensor:
    return logits_of(path, TensorParallelGroup.from_environment("cpu"))


def test_two_ranks_equal_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", Kind.Q3_K)
    for logits in run_ranks(2, logits_on_this_rank, path):
        torch.testing.assert_close(
            logits, logits_of(path, TensorParallelGroup()), atol=1e-4, rtol=1e-4
        )


# fields of which a GGUF file says nothing
GGUF_FIELDS: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "gemma3_text": {"query_pre_attn_scalar": 12},
}
# Files of glm have the architecture of its first code, those of mistral no window, and those of the
# others architectures that are not read.
NOT_READ = {"glm", "mistral-window", "apertus"}
NOT_READ |= {"minicpm3"}
NOT_READ |= {"nemotron_h"}  # it has experts in groups, and MLPs without experts
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 12},
    "theta": {"rope_parameters": rope("default", theta=500_000.0)},
    "linear": {"rope_parameters": rope("linear", factor=4.0)},
    "yarn": {"rope_parameters": rope("yarn", factor=8.0, original_max_position_embeddings=64)},
    "attention-factor": {
        "rope_parameters": rope(
            "yarn", factor=8.0, original_max_position_embeddings=64, attention_factor=1.5
        )
    },
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    **{
        name: {**options, **GGUF_FIELDS.get(name, {})}
        for name, options in OTHERS.items()
        if name not in NOT_READ
    },
    "mistral": {"family": "mistral", "sliding_window": None},
    "nemotron_h": {
        "family": "nemotron_h",
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
    },
    "nemotron_h-experts": {
        "family": "nemotron_h",
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
        "intermediate_size": 20,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    "phi3-short": {"family": "phi3", "original_max_position_embeddings": 512},
    "smollm3-tied": {"family": "smollm3", "no_rope_layer_interval": 4, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_equals_the_folder_it_was_converted_from(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    folder = checkpoint(**MODELS[name])
    path = convert(folder, tmp_path / "model.gguf")
    theirs, ours = (ModelConfig.from_pretrained(source) for source in (folder, path))
    assert ours == ModelConfig.from_name(str(path))
    own_family = {"mistral": "llama"}
    own_family |= {"exaone": "llama"}
    if theirs.recurrent is None:
        own_family["granitemoehybrid"] = "granite"
    own_family |= {"glm4_moe_lite": "deepseek_v3"}
    assert ours.family == own_family.get(theirs.family, theirs.family)
    rounded = ["norm_eps", "logits_scaling"]
    rounded += [field for field in vars(ours) if field.endswith("multiplier")]
    for field in rounded:
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field))
    known = {"family": ours.family, "dtype": None, "stop_tokens": frozenset()}
    known |= {"interleaved_rope": ours.interleaved_rope, "mlp_names": ours.mlp_names}
    known |= {field: getattr(ours, field) for field in rounded}
    assert ours.query_scaling == (theirs.query_scaling and pytest.approx(theirs.query_scaling))
    known["query_scaling"] = ours.query_scaling
    assert (ours.windowed_rope is None) == (theirs.windowed_rope is None)
    if ours.windowed_rope is not None and theirs.windowed_rope is not None:
        for field in ("rope_type", "rope_theta"):
            assert ours.windowed_rope[field] == theirs.windowed_rope[field]
    is_tiled = ours.recurrent is not None and ours.recurrent.is_tiled
    if is_tiled and theirs.recurrent is not None:
        known["recurrent"] = replace(theirs.recurrent, is_tiled=True)
    if theirs.rope["rope_type"] == "llama3":  # a file has divisors of frequencies alone
        known["trained_positions"] = None
    assert replace(ours, rope={}, windowed_rope=None) == replace(
        theirs, rope={}, windowed_rope=None, **known
    )
    for length in (20, 99):  # LongRoPE's factors depend on it
        frequencies, scale = ours.inverse_frequencies(9, length)
        expected, expected_scale = theirs.inverse_frequencies(9, length)
        torch.testing.assert_close(frequencies, expected)
        assert scale == pytest.approx(expected_scale)
    if is_tiled:  # other heads come first: the next test compares logits
        return
    for group in (TensorParallelGroup(), TensorParallelGroup(1, 2)):
        assert_same_parameters(
            load_model(folder, group, "float32"), load_model(path, group, "float32")
        )


def test_a_file_of_internlm2_equals_one_of_a_llama(checkpoint: Checkpoints, tmp_path: Path) -> None:
    paths = [
        convert(checkpoint(), tmp_path / f"{name}.gguf", architecture=name)
        for name in ("llama", "internlm2")
    ]
    first, second = (ModelConfig.from_name(str(path)) for path in paths)
    assert first == second
    assert_same_parameters(*(load_model(path, TensorParallelGroup(), "float32") for path in paths))


def describe_older_latents(writer: Any, hf: Any) -> None:
    """Add the dimensions of heads alone, as the converter did until 2025."""
    writer.add_head_count_kv(hf.num_attention_heads)
    if hf.q_lora_rank is not None:
        writer.add_q_lora_rank(hf.q_lora_rank)
    writer.add_kv_lora_rank(hf.kv_lora_rank)
    writer.add_key_length(hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    writer.add_value_length(hf.v_head_dim)
    writer.add_rope_dimension_count(hf.qk_rope_head_dim)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_older_files_of_latents_equal_newer_ones(
    checkpoint: Checkpoints, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(**OTHERS[name])
    newer = convert(folder, tmp_path / "newer.gguf")
    monkeypatch.setattr(support.gguf, "with_split_latents", lambda hf, tensors: tensors)
    monkeypatch.setattr(support.gguf, "_describe_latents", describe_older_latents)
    older = convert(folder, tmp_path / "older.gguf")
    assert ModelConfig.from_name(str(older)) == ModelConfig.from_name(str(newer))
    for group in (TensorParallelGroup(), TensorParallelGroup(1, 2)):
        models = (load_model(path, group, "float32") for path in (older, newer))
        assert_same_parameters(*models)
    tokens = random_tokens(40)
    logits = all_logits(load_model(older, TensorParallelGroup(), "float32"), tokens)
    torch.testing.assert_close(logits, reference_logits(folder, tokens), atol=1e-4, rtol=1e-4)


def test_files_that_say_little_of_experts_are_read_as_by_llama_cpp(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones of GLM-4.7-Flash do not say that gating is by sigmoids: corrections mean it."""

    def describe(writer: Any, hf: Any) -> None:
        writer.add_expert_count(hf.n_routed_experts)
        writer.add_expert_used_count(hf.num_experts_per_tok)
        writer.add_expert_feed_forward_length(hf.moe_intermediate_size)
        writer.add_expert_shared_count(hf.n_shared_experts)
        writer.add_leading_dense_block_count(1)

    monkeypatch.setattr(support.gguf, "_describe_experts", describe)
    folder = checkpoint(**OTHERS["glm4_moe_lite"])
    experts = ModelConfig.from_name(str(convert(folder, tmp_path / "model.gguf"))).experts
    assert experts is not None
    assert experts.layers == {1, 2}
    gating = experts.gating
    assert (gating.is_sigmoid, gating.normalised, gating.factor) == (True, False, 1.0)


BROKEN = {
    "deepseek_v2": [
        ("", {"deepseek2__rope__dimension_count": 20}, "= 20 of 20 dimensions of a head, all"),
        ("blk.1.attn_kv_a_mqa.weight", {}, "attn_kv_a_mqa.weight is missing"),
        ("blk.1.attn_k_b.weight", {}, "attn_kv_b.weight is missing"),
        ("blk.1.attn_q.weight", {}, "attn_q.weight is missing"),
        ("", {"deepseek2__attention__kv_lora_rank": 25}, "attn_.*but its metadata implies"),
        ("", {"deepseek2__expert_gating_func": 2}, "by sigmoids are not supported without exp_pr"),
        ("", {"deepseek2__expert_gating_func": 3}, "expert_gating_func = 3; it must be"),
        ("", {"deepseek2__expert_group_count": 2}, "experts in groups, .* not supported without"),
    ],
    "granite-mamba": [
        ("blk.0.ssm_d", {}, "blk.0.ssm_d is missing"),
        ("blk.2.ssm_conv1d.bias", {}, r"blk.2.ssm_conv1d.bias is missing\. Was the"),
        ("blk.0.ssm_conv1d.weight", {}, "ssm_conv1d.weight is missing"),
        ("blk.1.attn_k.weight", {}, "attn_k.weight is missing"),
        ("", {"granitehybrid__ssm__time_step_rank": 7}, "inner_size = 64, .* not divide into"),
        ("", {"granitehybrid__ssm__inner_size": 96}, "ssm_.*but its metadata implies"),
        ("", {"granitehybrid__ssm__state_size": 0}, "ssm.state_size = 0; it must be"),
        ("", {"granitehybrid__ssm__group_count": 2}, "ssm_.*but its metadata implies"),
        ("", {"granitehybrid__moe_latent_size": 8}, "moe_latent_size = '8', which indicates"),
    ],
}


@pytest.mark.parametrize(
    ("name", "without", "metadata", "words"),
    [(name, *case) for name, cases in BROKEN.items() for case in cases],
)
def test_broken_files_of_latents_and_mamba(
    checkpoint: Checkpoints,
    tmp_path: Path,
    name: str,
    without: str,
    metadata: dict[str, Any],
    words: str,
) -> None:
    path = convert(
        checkpoint(**OTHERS[name]), tmp_path / "broken.gguf", without=without, **metadata
    )
    with pytest.raises((ConfigError, CheckpointError), match=words):
        ModelConfig.from_name(str(path))


NEMOTRON_LISTS = [
    ("attention.head_count_kv", [0, 0, 2, 0, 2], "= 2 for layer 4, whose tensors are of another"),
    ("attention.head_count_kv", [0, 0, 2, 0, 4], "must be the same in all layers that have such"),
    ("feed_forward_length", [0, 20, 0, 0, 0], "= 0 for layer 3, whose tensors are of another"),
    ("feed_forward_length", [0, 20, 0, 24, 0], r"= \[0, 20, 0, 24, 0\]; it must be the same in"),
]


@pytest.mark.parametrize(("name", "numbers", "words"), NEMOTRON_LISTS)
def test_lists_of_layers_that_contradict_tensors(
    checkpoint: Checkpoints, tmp_path: Path, name: str, numbers: list[int], words: str
) -> None:
    path = convert(checkpoint(**MODELS["nemotron_h-experts"]), tmp_path / "model.gguf")
    header = read_header(path)
    header.metadata[f"nemotron_h_moe.{name}"] = numbers
    with pytest.raises(ConfigError, match=words):
        config_fields(header)


@pytest.mark.parametrize("scales", [{}, dict.fromkeys(MULTIPLIERS, 0.0)])
def test_multipliers_of_granite_that_a_file_does_not_say(
    checkpoint: Checkpoints, tmp_path: Path, scales: dict[str, float]
) -> None:
    """Scores are divided by the square root of a head's dimensions, as in other models."""
    path = convert(checkpoint(**MODELS["granite-mamba"]), tmp_path / "model.gguf")
    header = read_header(path)
    for name in MULTIPLIERS:
        header.metadata.pop(f"granitehybrid.{name}")
    header.metadata.update({f"granitehybrid.{name}": each for name, each in scales.items()})
    config = ModelConfig.from_fields(config_fields(header))
    assert config.query_multiplier == pytest.approx(1.0)
    others = config.embedding_multiplier, config.residual_multiplier, config.logits_scaling
    assert others == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["granite-mamba", "nemotron_h", "exaone"])
def test_files_must_say_the_epsilon_of_norms(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    path = convert(checkpoint(**MODELS[name]), tmp_path / "model.gguf")
    header = read_header(path)
    own = header.metadata["general.architecture"]
    epsilon = header.metadata.pop(f"{own}.attention.layer_norm_rms_epsilon")
    header.metadata[f"{own}.attention.layer_norm_epsilon"] = epsilon
    with pytest.raises(ConfigError, match=r"lacks \w+.attention.layer_norm_rms_epsilon"):
        config_fields(header)


@pytest.mark.parametrize("name", ["granite-experts", "nemotron_h-experts"])
def test_files_of_mamba_match_transformers(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    folder = checkpoint(**MODELS[name])
    path, tokens = convert(folder, tmp_path / "model.gguf"), random_tokens(60)
    expected = reference_logits(folder, tokens)
    for logits in (
        all_logits(load_model(path, TensorParallelGroup(), "float32"), tokens),
        *(each for (each,) in run_ranks(2, logits_on_rank, [path], tokens)),
    ):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def logits_on_rank(paths: list[Path], tokens: Tensor) -> list[Tensor]:
    group = TensorParallelGroup.from_environment("cpu")
    return [all_logits(load_model(path, group, "float32"), tokens) for path in paths]


def test_files_of_delta_nets_match_transformers(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """On one rank and two; the heads of the second and third are in another order."""
    folders = [checkpoint(**OTHERS[name]) for name in DELTA_NETS]
    paths = [convert(folder, tmp_path / f"{folder.name}.gguf") for folder in folders]
    tokens = random_tokens(60)
    by_rank = [logits_on_rank(paths, tokens), *run_ranks(2, logits_on_rank, paths, tokens)]
    for index, folder in enumerate(folders):
        expected = reference_logits(folder, tokens)
        for logits in by_rank:
            torch.testing.assert_close(logits[index], expected, atol=1e-4, rtol=1e-4)


def assert_same_logits(path: Path, folder: Path, tokens: Tensor) -> None:
    """Assert that a file has the logits of the folder it was converted from, in transformers."""
    torch.testing.assert_close(
        all_logits(load_model(path, TensorParallelGroup(), "float32"), tokens),
        reference_logits(folder, tokens),
        atol=1e-4,
        rtol=1e-4,
    )


def extended(tensors: dict[str, Tensor], layer: int) -> dict[str, np.ndarray]:
    """Return a file's tensors with a layer for multi-token prediction, as converters add it."""
    full = {name: each for name, each in tensors.items() if name.startswith("blk.1.")}
    added = {name.replace("blk.1.", f"blk.{layer}."): each for name, each in full.items()}
    for part, shape in {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,)}.items():
        added[f"blk.{layer}.nextn.{part}.weight"] = torch.ones(shape)
    return {name: each.numpy() for name, each in {**tensors, **added}.items()}


def rewritten(
    path: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Any]], **fields: int
) -> Path:
    """Write a copy of a file in F32 with other tensors, and further fields of its architecture."""
    reader = GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    for name, each in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = each.types[1] if len(each.types) > 1 else None
            writer.add_key_value(name, each.contents(), each.types[0], sub_type)
    for name, value in fields.items():
        writer.add_key_value(f"{architecture}.{name}", value, GGUFValueType.UINT32)
    tensors = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    for name, array in change(tensors).items():
        writer.add_tensor(name, np.asarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_layers_for_multi_token_prediction_are_left_out(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder, tokens = checkpoint(**OTHERS["qwen3_5"]), random_tokens(40)
    plain = convert(folder, tmp_path / "plain.gguf")
    path = rewritten(
        plain,
        tmp_path / "mtp.gguf",
        lambda tensors: extended(tensors, 3),
        nextn_predict_layers=1,
    )
    path = rewrite_header(path, tmp_path / "both.gguf", {"qwen35.block_count": 4})
    assert ModelConfig.from_name(str(path)) == ModelConfig.from_name(str(plain))
    assert_same_logits(path, folder, tokens)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ffn_down.scale", (1,)),
        ("nextn.embed_tokens.weight", (101, 32)),
        ("attn_q.weight", (7, 32)),
    ],
)
def test_blocks_with_other_tensors_are_left_out(
    checkpoint: Checkpoints, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    folder = with_predictor(checkpoint(**OTHERS["qwen3_5"]), tmp_path / "folder")
    path = convert(folder, tmp_path / "whole.gguf")
    assert ModelConfig.from_name(str(path)).has_predictor

    def change(tensors: dict[str, Tensor]) -> dict[str, Any]:
        tensors[f"blk.3.{name}"] = torch.ones(shape)
        return {each: tensor.numpy() for each, tensor in tensors.items()}

    other = rewritten(path, tmp_path / "other.gguf", change)
    assert not ModelConfig.from_name(str(other)).has_predictor
    load_model(other, TensorParallelGroup(), "float32")


def test_a_tensor_named_like_a_layer_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = with_predictor(checkpoint(**OTHERS["qwen3_5"]), tmp_path / "folder")
    path = rewritten(
        convert(folder, tmp_path / "whole.gguf"),
        tmp_path / "other.gguf",
        lambda tensors: {
            **{name: each.numpy() for name, each in tensors.items()},
            "blk.3": np.ones(4, dtype=np.float32),
        },
    )
    with pytest.raises(CheckpointError, match="has tensors of 4 layers"):
        ModelConfig.from_name(str(path))


def test_older_files_of_qwen3_next_stack_projections(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder, tokens = checkpoint(**OTHERS["qwen3_next"]), random_tokens(40)
    stored = load_file(folder / "model.safetensors")

    def older(tensors: dict[str, Tensor]) -> dict[str, Any]:
        for layer in (0, 2):
            del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
            name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
            tensors[f"blk.{layer}.ssm_in.weight"] = stored[name]
        return {name: each.numpy() for name, each in tensors.items()}

    path = rewritten(convert(folder, tmp_path / "new.gguf"), tmp_path / "old.gguf", older)
    assert_same_logits(path, folder, tokens)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("blk.2.ssm_a", "tensor blk.2.ssm_a is missing"),
        ("blk.0.attn_gate.weight", "tensor blk.0.attn_gate.weight is missing"),
        ("blk.1.attn_q.weight", "tensor blk.1.attn_q.weight is missing"),
        ("blk.2.ssm_conv1d.weight", "tensor blk.2.attn_q.weight is missing"),
    ],
)
def test_incomplete_layers_are_found_before_loading(
    checkpoint: Checkpoints, tmp_path: Path, part: str, message: str
) -> None:
    path = convert(checkpoint(**OTHERS["qwen3_5"]), tmp_path / "whole.gguf")
    broken = rewritten(
        path,
        tmp_path / "broken.gguf",
        lambda tensors: {name: each.numpy() for name, each in tensors.items() if name != part},
    )
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_name(str(broken))


@pytest.mark.parametrize("count", [3, 99])
def test_a_file_of_nothing_but_layers_for_multi_token_prediction(
    checkpoint: Checkpoints, tmp_path: Path, count: int
) -> None:
    path = convert(checkpoint(**OTHERS["qwen3_5"]), tmp_path / "model.gguf")
    path = rewrite_header(path, tmp_path / "mtp.gguf", {"qwen35.nextn_predict_layers": count})
    with pytest.raises(ConfigError, match=f"nextn_predict_layers = {count} of block_count = 3"):
        ModelConfig.from_name(str(path))


@pytest.mark.parametrize("name", DELTA_NETS)
def test_packed_delta_nets_are_planned(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "intermediate_size": 64}
    if name != "qwen3_5":
        sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    folder = checkpoint(**{**OTHERS[name], "hidden_size": 64, **sizes})
    path = convert(folder, tmp_path / "model.gguf", Kind.Q8_0)
    config, tokens = ModelConfig.from_pretrained(path, packed=True), random_tokens(60)
    types = {name for name, _ in config.kept_types}
    assert {"model.layers.0.linear_attn.in_proj_qkv.weight"} <= types
    whole = load_model(path, TensorParallelGroup(), "float32")
    packed = load_model(path, TensorParallelGroup(), "float32", config)
    for ranks in (1, 2):
        for rank in range(ranks):
            own = load_model(path, TensorParallelGroup(rank, ranks), "bfloat16", config)
            planned = weight_sizes(config, ranks, 2, rank)
            assert abs(parameter_bytes(own) - planned.nbytes - planned.scratch) < 4000  # float32
    torch.testing.assert_close(all_logits(packed, tokens), all_logits(whole, tokens))


def test_mistral3_is_mistral_or_ministral(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint(family="mistral", sliding_window=None)
    path = convert(folder, tmp_path / "model.gguf", architecture="mistral3")
    config, group = ModelConfig.from_pretrained(path), TensorParallelGroup()
    assert config.family == "ministral3"
    assert config.query_scaling is None
    tokens = random_tokens(60)
    torch.testing.assert_close(
        all_logits(load_model(path, group, "float32"), tokens), reference_logits(folder, tokens)
    )


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3_moe")],
)
def test_text_models_of_images(
    checkpoint: Checkpoints, tmp_path: Path, architecture: str, family: str
) -> None:
    folder = checkpoint(family=family, **GGUF_FIELDS.get(family, {}))
    options = {f"{architecture}__n_deepstack_layers": 3} if "3" in architecture else {}
    path = convert(folder, tmp_path / "model.gguf", architecture=architecture, **options)
    header = read_header(path).metadata
    sections = {f"{architecture}.rope.dimension_sections": [2, 1, 1, 0]}
    path = rewrite_header(path, tmp_path / "images.gguf", {**header, **sections})
    group = TensorParallelGroup()
    assert ModelConfig.from_pretrained(path).family == family
    assert_same_parameters(load_model(folder, group, "float32"), load_model(path, group, "float32"))


@pytest.mark.parametrize("mscale", [0.0, 1.0])
def test_yarn_log_multiplier_is_mscale_of_all_dimensions(
    checkpoint: Checkpoints, tmp_path: Path, mscale: float
) -> None:
    """Where it is 1, as in Ministral 3, cos and sin are not scaled."""
    parameters = rope("yarn", factor=8.0, original_max_position_embeddings=64)
    path = convert(
        checkpoint(family="mistral", sliding_window=None, rope_parameters=parameters),
        tmp_path / "model.gguf",
        architecture="mistral3",
        mistral3__rope__scaling__yarn_log_multiplier=mscale,
    )
    _, scale = ModelConfig.from_pretrained(path).inverse_frequencies(9)
    assert scale == pytest.approx(1.0 if mscale else 0.1 * math.log(8) + 1)


@pytest.mark.parametrize(
    "kind", slow_except([Kind.Q8_0, Kind.Q4_K, Kind.IQ4_XS], 1), ids=lambda kind: kind.name
)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (
            "qwen3_moe",
            {"decoder_sparse_step": 1, "moe_intermediate_size": 512, "head_dim": 64},
        ),
        ("mixtral", {}),
        ("phi3", {}),
    ],
)
def test_stacked_and_fused_tensors_are_those_of_the_file(
    checkpoint: Checkpoints, tmp_path: Path, kind: Kind, family: str, sizes: dict[str, Any]
) -> None:
    """Two ranks' experts, queries, keys and values lie inside of one tensor."""
    path = convert(checkpoint(family=family, **WIDE, **sizes), tmp_path / "model.gguf", kind)
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = GgufCheckpoint(path)
    names = [name for name, info in weights._infos.items() if len(info.shape) == 2]
    assert (
        len([name for name in names if ".experts." in name])
        == ({"qwen3_moe": 36, "mixtral": 24, "phi3": 0}[family])
    )
    for name in names:
        info = weights._infos[name]
        whole = dequantize(stored[info.name].data, stored[info.name].tensor_type)
        if found := re.search(r"\.experts\.(\d+)\.", name):
            whole = whole[int(found[1])]
        tensor = weights.tensor(name, whole.shape)
        for index in (slice(None), slice(100, 200), (slice(None), slice(0, 128))):
            assert np.array_equal(tensor[index].numpy(), whole[index]), name


def test_frequency_factors_equal_llama3_rope(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """llama.cpp's converter writes divisors of the frequencies instead of a RoPE type."""
    llama3 = rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    folder = checkpoint(rope_parameters=llama3, head_dim=None, hidden_size=64)
    path = convert(folder, tmp_path / "model.gguf")
    theirs, ours = (ModelConfig.from_pretrained(source) for source in (folder, path))
    plain = ModelConfig.from_pretrained(checkpoint(hidden_size=64))
    expected, scale = theirs.inverse_frequencies(99)
    frequencies, ours_scale = ours.inverse_frequencies(99)
    assert not torch.allclose(plain.inverse_frequencies(99)[0], expected)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert ours_scale == scale
    assert ours.context_limit == theirs.context_limit
    load_model(path, TensorParallelGroup())  # the tensor of factors is not an unused one


def test_stop_tokens_are_read_from_the_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    ids = {
        f"tokenizer__ggml__{name}_token_id": 7 + index for index, name in enumerate(["eos", "eot"])
    }
    path = convert(checkpoint(), tmp_path / "model.gguf", **ids)
    assert ModelConfig.from_pretrained(path).stop_tokens == {7, 8}
    none = convert(checkpoint(), tmp_path / "none.gguf")
    assert ModelConfig.from_pretrained(none).stop_tokens == frozenset()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q4_K, torch.bfloat16),
    ],
)
def test_default_dtype_is_that_of_the_matrices(
    checkpoint: Checkpoints, tmp_path: Path, kind: Kind, dtype: torch.dtype
) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", kind)
    assert open_checkpoint(path).dtype == dtype
    # as for any checkpoint, float16 is converted to float32 on a CPU
    loaded = torch.float32 if dtype == torch.float16 else dtype
    model, whole = (
        load_model(path, TensorParallelGroup()),
        load_model(path, TensorParallelGroup(), "float32"),
    )
    for parameter, unrounded in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, unrounded.to(loaded))


def test_peak_memory_is_about_the_ranks_share(checkpoint: Checkpoints, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 4000,
    }
    large = convert(checkpoint(**sizes), tmp_path / "large.gguf", Kind.Q8_0)
    small = convert(checkpoint(**WIDE), tmp_path / "small.gguf", Kind.Q8_0)
    # in a fresh process
    [(share, peak)] = run_ranks(1, load_and_watch, large, small)
    assert 40e6 < share < 60e6  # half of the parameters in 16 bits
    assert peak <= share + (20 << 20)  # chunks do not grow with the file


def test_names_resolve_to_files_and_folders(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint()
    folder_of_one = tmp_path / "one"
    folder_of_one.mkdir()
    path = convert(folder, folder_of_one / "model.GGUF")
    for name in (path, folder_of_one):
        assert resolve(str(name), TensorParallelGroup()) == path
        assert ModelConfig.from_name(str(name)) == ModelConfig.from_pretrained(path)
    (folder_of_one / "config.json").write_text((folder / "config.json").read_text())
    # a config.json makes it a Hugging Face folder, whatever else it holds
    assert resolve(str(folder_of_one), TensorParallelGroup()) == folder_of_one
