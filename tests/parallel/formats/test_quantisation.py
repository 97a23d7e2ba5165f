"""Configs that say how weights are quantised, in any file; refusals name the method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config.model_config import ModelConfig
from parallel.errors import CheckpointError, ConfigError
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.models import edit_weights
from support.quantised import awq, fp8, gptq, quantise

Checkpoints = Callable[..., Path]
READ = (
    lambda folder: ModelConfig.from_pretrained(folder, packed=True),
    lambda folder: ModelConfig.from_name(str(folder), packed=True),
    lambda folder: load_model(folder, TensorParallelGroup()),
)
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def scheme(layout: str, weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": groups,
        **fields,
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "exl2", "bits": 4.0}, "EXL2"),
        ({"quant_method": "exl3", "bits": 3.0}, "EXL3"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "something-new"}, "something-new"),
        ({"group_size": 64, "bits": 4}, "an unknown method"),
        ("int8", "int8"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "GPTQ in the format marlin",
        ),
        ({"quant_method": "gptq", "bits": "four"}, "gptq with an unreadable config"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in the format gemv"),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "packing_format": "auto_round:llm_compressor",
            },
            "AutoRound in the packing format auto_round:llm_compressor",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 as e5m2"),
        (
            {"quant_method": "fp8", "weight_scale_semantics": "inverse"},
            "FP8 with inverse scales",
        ),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "gptq with rotations"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 3}}},
            "GPTQ with 3 bits",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt as NVFP4"),
        (
            scheme("nvfp4-pack-quantized", {**INT4, "type": "float"}),
            "compressed-tensors in the format nvfp4-pack-quantized",
        ),
        (
            scheme("pack-quantized", {**INT4, "num_bits": 2}),
            "compressed-tensors with weights int2",
        ),
        (
            scheme("pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            "compressed-tensors in the format sparse-24-bitmask",
        ),
        (
            scheme("pack-quantized", INT4, transform_config={"config_groups": {"R3": {}}}),
            "compressed-tensors with transforms",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_refused_by_name(
    checkpoint: Checkpoints, tmp_path: Path, config: Any, name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    for read in READ:
        with pytest.raises(ConfigError) as caught:
            read(folder)
        assert f"weights quantised by {name} (use a GGUF file, or an AWQ, GPTQ" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "convert"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}, gptq(group=32)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, awq(32)),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            fp8((-1, -1), torch.float32, "weight_scale", "tensor"),
        ),
    ],
    ids=["gptq", "awq", "modelopt"],
)
def test_files_beside_the_config(
    checkpoint: Checkpoints, tmp_path: Path, file: str, content: dict[str, Any], convert: Any
) -> None:
    folder = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    expected = quantise(checkpoint(**sizes), folder, None, convert)
    for read in READ:
        with pytest.raises(CheckpointError, match="no file beside it says how they are quantised"):
            read(folder)
    (folder / file).write_text("[]")
    for read in READ:
        with pytest.raises(ConfigError, match=f"{file} is not a JSON object.: fetch it again"):
            read(folder)
    (folder / file).write_text(json.dumps(content))
    config = ModelConfig.from_name(str(folder), packed=True)
    assert config == ModelConfig.from_pretrained(folder, packed=True)
    assert dict(config.kept_types).keys() == expected.keys()
    model = load_model(folder, TensorParallelGroup(), "float32")
    down = model.layers[0].mlp.down.weight.values
    assert down is not None
    assert torch.equal(down, expected["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 1e999},
        {"quant_method": "gptq", "bits": 4.5},
        {"quant_method": "gptq", "bits": [4]},
        {"quant_method": "gptq", "bits": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "group_size": -2},
        {"quant_method": "gptq", "bits": 4, "group_size": "many"},
        {"quant_method": "gptq", "bits": 4, "dynamic": ["a"]},
        {"quant_method": "fp8", "weight_block_size": [0, 0]},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128, 1e999]},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        {"quant_method": "compressed-tensors", "sparsity_config": "dense"},
        scheme("pack-quantized", {**INT4, "group_size": 1e999}),
        {"quant_method": "modelopt", "quantization": 1},
    ],
    ids=str,
)
def test_configs_of_wrong_types(tmp_path: Path, checkpoint: Checkpoints, config: Any) -> None:
    fields = json.loads((checkpoint() / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "quantization_config": config}))
    message = rf"weights quantised by {config['quant_method']} with an unreadable config \(use a GG"
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_name(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight", torch.zeros(0, 32), r"has shape \(0, 32\)"),
        ("weight", torch.zeros(96, 0), r"has shape \(96, 0\)"),
        ("weight", torch.zeros(2, 96, 32), r"has shape \(2, 96, 32\)"),
        ("weight_scale_inv", torch.zeros(96, 0), r"has scales of shape \(96, 0\)"),
        ("weight_scale_inv", torch.zeros(1, 1, 1), r"has scales of shape \(1, 1, 1\)"),
        ("qweight", torch.zeros(12, 96), "has a qweight, but its config says fp8"),
    ],
    ids=str,
)
def test_shapes_of_no_matrix(
    checkpoint: Checkpoints, tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    folder = tmp_path / "model"
    config, convert = METHODS["fp8"]
    quantise(checkpoint(hidden_size=96, intermediate_size=96, head_dim=8), folder, config, convert)
    dtype = {"weight": torch.float8_e4m3fn, "qweight": torch.int32}.get(name, torch.bfloat16)
    edit_weights(folder, lambda tensors: tensors.update({f"{UP}.{name}": tensor.to(dtype)}))
    for read in READ:
        with pytest.raises(CheckpointError, match=message):
            read(folder)


def test_mlx_is_refused_though_it_has_another_field(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """MLX writes its config twice, neither time with a method."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    path, mlx = folder / "config.json", {"group_size": 64, "bits": 4, "mode": "affine"}
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "quantization": mlx, "quantization_config": mlx}))
    for read in READ:
        with pytest.raises(ConfigError, match=r"weights quantised by MLX .use a GGUF file"):
            read(folder)


def test_weights_that_are_missing_or_incomplete(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """What can be packed is not known without them."""
    folder = tmp_path / "model"
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantise(checkpoint(), folder, config, gptq(group=32))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="the weights are quantised, and their files are inc"):
        ModelConfig.from_name(str(folder), packed=True)
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        ModelConfig.from_name(str(folder / "config.json"), packed=True)


def test_compressed_tensors_under_its_former_name(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = checkpoint() / "config.json"
    fields = json.loads(path.read_text())
    fields["compression_config"] = scheme("nvfp4-pack-quantized", INT4)
    del fields["compression_config"]["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="compressed-tensors in the format nvfp4-pack-quantized"):
        ModelConfig.from_name(str(tmp_path))


def test_a_head_that_is_quantised_is_not_tied(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}
    path = checkpoint(vocab_size=320)
    expected = quantise(path, folder, config, gptq(group=32), names=("lm_head",))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    for packed in (False, True):
        model_config = ModelConfig.from_pretrained(folder, packed=packed)
        assert not model_config.tied
        model = load_model(folder, TensorParallelGroup(), "float32", model_config)
        rows = model.head.weight.select(torch.arange(320))
        assert torch.equal(rows, expected["lm_head.weight"])


UP = "model.layers.0.mlp.up_proj"


def put(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def replace(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.{suffix}"] = change(tensors[f"{UP}.{suffix}"])

    return replace


def spoil(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor.view(-1)[3] = value
    return tensor


NOT_FINITE = "up_proj.weight has weights that are not finite"
BROKEN = {
    "zeros of another shape": ("gptq", put("qzeros", lambda x: x[:-1]), "qzeros of shape (2, 12)"),
    "zeros too narrow": ("gptq", put("qzeros", lambda x: x[:, :-1]), "qzeros of shape (3, 11)"),
    "zeros of another type": ("gptq", put("qzeros", lambda x: x.float()), "has qzeros of F32"),
    "no zeros": ("gptq", lambda x: x.pop(f"{UP}.qzeros"), "has no qzeros"),
    "no scales": ("awq", lambda x: x.pop(f"{UP}.scales"), "has no scales"),
    "a group for all columns": (
        "awq",
        lambda x: [put(each, lambda y: y[:1])(x) for each in ("scales", "qzeros")],
        "has scales of shape (1, 96) for codes of shape (96, 12), and its config says 4 bits in gr",
    ),
    "groups that do not divide": (
        "gptq",
        lambda x: [put(each, lambda y: y[:2])(x) for each in ("scales", "qzeros")],
        "has scales of shape (2, 96) for codes of shape (12, 96), and its config says 4 bits in gr",
    ),
    "columns cut short": ("gptq", put("qweight", lambda x: x[:-1]), "g_idx of shape (96,) instead"),
    "rows cut short": ("awq", put("qweight", lambda x: x[:, :-1]), "qweight of shape (96, 11)"),
    "g_idx out of range": (
        "gptq",
        put("g_idx", lambda x: spoil(x, 3)),
        "has 3 groups, but g_idx names 0 to 3",
    ),
    "g_idx below zero": ("gptq", put("g_idx", lambda x: spoil(x, -1)), "g_idx names -1 to 2"),
    "groups of other sizes": (
        "ordered",
        put("g_idx", lambda x: x.clamp(max=1)),
        "has groups of other sizes than 32 columns (g_idx)",
    ),
    "infinite scale": ("awq", put("scales", lambda x: spoil(x, float("inf"))), NOT_FINITE),
    "scale that is no number": (
        "fp8",
        put("weight_scale_inv", lambda x: spoil(x, float("nan"))),
        NOT_FINITE,
    ),
    "weight that is no number": (
        "fp8",
        put("weight", lambda x: spoil(x.view(torch.uint8), 255).view(torch.float8_e4m3fn)),
        NOT_FINITE,
    ),
    "blocks of another size": (
        "fp8",
        put("weight_scale_inv", lambda x: x[:, :-1]),
        "of shape (96, 96) has scales of shape (3, 2)",
    ),
    "no scales of bytes": (
        "fp8",
        lambda x: x.pop(f"{UP}.weight_scale_inv"),
        "is F8_E4M3, and has no weight_scale",
    ),
    "a matrix twice": (
        "awq",
        lambda x: x.update({f"{UP}.weight": torch.zeros(96, 96)}),
        "up_proj.weight is stored twice",
    ),
    "a bias that the model lacks": (
        "gptq",
        lambda x: x.update({f"{UP}.bias": torch.ones(96)}),
        "1 tensors are not part of the model",
    ),
    "another method": (
        "awq",
        lambda x: x.update({f"{UP}.weight_packed": x.pop(f"{UP}.qweight")}),
        "has a weight_packed, but its config says awq",
    ),
    "a type of another method": (
        "awq",
        lambda x: x.update({"model.norm.weight": torch.ones(96, dtype=torch.uint8)}),
        "model.norm.weight is U8, with no scales beside it",
    ),
}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
METHODS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(group=32)),
    "ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        gptq(group=32, permuted=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(32)),
    "fp8": (FP8, fp8((32, 32), torch.bfloat16, "weight_scale_inv")),
}


def load(folder: Path, packed: bool) -> None:
    config = ModelConfig.from_pretrained(folder, packed=packed)
    load_model(folder, TensorParallelGroup(), "float32", config)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(checkpoint: Checkpoints, tmp_path: Path, name: str, packed: bool) -> None:
    method, change, message = BROKEN[name]
    folder = tmp_path / "model"
    config, convert = METHODS[method]
    quantise(checkpoint(hidden_size=96, intermediate_size=96, head_dim=8), folder, config, convert)
    edit_weights(folder, change)
    if name == "groups of other sizes" and not packed:
        load(folder, packed)  # each column names its group, which is all that numbers need
        return
    with pytest.raises(CheckpointError) as caught:
        load(folder, packed)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
