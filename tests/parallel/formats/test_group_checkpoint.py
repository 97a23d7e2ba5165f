"""Quantised safetensors: weights are those of the libraries' formulas, packed or not."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from parallel.config.model_config import ModelConfig
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError
from parallel.formats.group_checkpoint import GroupCheckpoint
from parallel.formats.plane_format import is_kept
from parallel.formats.quantisation import Quantisation
from parallel.model.loading import load_model, open_checkpoint, parameter_bytes
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import Matrix
from parallel.weights.packed import Slice
from support.loading import all_logits
from support.models import WIDE, random_tokens
from support.quantised import (
    PROJECTIONS,
    Expected,
    awq,
    compressed,
    fp8,
    gptq,
    ordered_words,
    pack,
    quantise,
)
from support.ranks import run_ranks
from support.slow import slow_except

Checkpoints = Callable[..., Path]
ONE_LAYER = {**WIDE, "num_hidden_layers": 1}
E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    convert: Callable[[], Callable[[Tensor], Expected]]
    kept: bool = True  # False: groups are no multiples of 32 columns
    ordered: bool = False  # a rank's columns cannot be kept
    hides_order: bool = False  # likewise, which only the weights tell


def words(method: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": 64, **fields}


def compressed_case(layout: str, **weights: Any) -> Case:
    weights = {"type": "int", "num_bits": 4, "symmetric": True, **weights}
    scheme = {"format": layout, "weights": weights}
    groups = {"group_0": {"targets": ["Linear"], **scheme}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return Case(config, lambda: compressed(scheme))


GROUPS = {"strategy": "group", "group_size": 64}
CASES = {
    "awq": Case(words("awq", version="gemm", zero_point=True), awq),
    "awq of 128": Case(words("awq", version="GEMM", group_size=128), lambda: awq(128)),
    "gptq": Case(words("gptq", desc_act=False), gptq),
    "gptq v2": Case(words("gptq", checkpoint_format="gptq_v2"), lambda: gptq(is_v1=False)),
    "gptq of 8 bits": Case(words("gptq", bits=8, group_size=32), lambda: gptq(8, 32)),
    "gptq of rows": Case(words("gptq", group_size=-1), lambda: gptq(group=-1)),
    "gptq of 16": Case(words("gptq", group_size=16), lambda: gptq(group=16), kept=False),
    "gptq with zero biases": Case(words("gptq"), lambda: gptq(has_bias=True)),
    "gptq in order of activations": Case(
        words("gptq", desc_act=True), lambda: gptq(permuted=True), ordered=True
    ),
    "gptq that does not say its order": Case(
        words("gptq"), lambda: gptq(permuted=True), hides_order=True
    ),
    "gptq with static groups": Case(words("gptq", desc_act=True), gptq, ordered=True),
    "auto-round as gptq": Case(words("auto-round", packing_format="auto_round:auto_gptq"), gptq),
    "auto-round": Case(
        words("intel/auto-round", packing_format="auto_round"), lambda: gptq(is_v1=False)
    ),
    "auto-round as awq": Case(words("auto-round", packing_format="auto_round:auto_awq"), awq),
    "compressed int4": compressed_case("pack-quantized", **GROUPS),
    "compressed int4 with zeros": compressed_case("pack-quantized", symmetric=False, **GROUPS),
    "compressed int4 of rows": compressed_case("pack-quantized", strategy="channel"),
    "compressed int8": compressed_case("pack-quantized", num_bits=8, strategy="channel"),
    "compressed int8 in groups": compressed_case(
        "pack-quantized", num_bits=8, symmetric=False, **GROUPS
    ),
    "compressed int8 in bytes": compressed_case("int-quantized", num_bits=8, strategy="channel"),
    "compressed fp8": compressed_case(
        "float-quantized", type="float", num_bits=8, strategy="tensor"
    ),
    "compressed fp8 of rows": compressed_case(
        "float-quantized", type="float", num_bits=8, strategy="channel"
    ),
    "compressed fp8 in blocks": compressed_case(
        "float-quantized",
        type="float",
        num_bits=8,
        strategy="block",
        block_structure=[128, 128],
    ),
    "compressed int4 in order of activations": Case(
        compressed_case("pack-quantized", actorder="group", **GROUPS).config,
        ordered_words,
        ordered=True,
    ),
    "compressed int4 whose order is not set": Case(
        compressed_case("pack-quantized", actorder="group", **GROUPS).config,
        lambda: ordered_words(is_set=False),
        ordered=True,
    ),
    "fp8 in blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda: fp8((128, 128), torch.bfloat16, "weight_scale_inv"),
    ),
    "fp8 in blocks that do not divide": Case(
        {"quant_method": "fp8", "weight_block_size": [96, 160]},
        lambda: fp8((96, 160), torch.float32, "weight_scale_inv"),
    ),
    "fp8 with exponents": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        lambda: fp8((128, 128), E8M0, "weight_scale_inv"),
    ),
    "fp8 of tensors": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda: fp8((-1, -1), torch.float32, "weight_scale", "tensor"),
    ),
    "fp8 of rows": Case(
        {"quant_method": "fbgemm_fp8"}, lambda: fp8((1, -1), torch.float32, "weight_scale", "row")
    ),
}
HAS_LIBRARY = importlib.util.find_spec("compressed_tensors") is not None
EVERY_CASE = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name.startswith("compressed") and not HAS_LIBRARY, reason="needs Python 3.11"
            ),
        )
        for name in CASES
    ],
)


def converted(checkpoint: Checkpoints, out: Path, name: str, **sizes: Any) -> tuple[Path, Any]:
    case = CASES[name]
    folder = checkpoint(**{**ONE_LAYER, **sizes})
    return out / "model", quantise(folder, out / "model", case.config, case.convert())


def packed_model(path: Path, dtype: str, group: TensorParallelGroup | None = None) -> Transformer:
    config = ModelConfig.from_pretrained(path, packed=True)
    return load_model(path, group or TensorParallelGroup(), dtype, config)


@EVERY_CASE
def test_weights_are_those_of_the_formula(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    """Whole matrices and ranks' slices, of rows and columns that cut words, groups and blocks."""
    path, expected = converted(checkpoint, tmp_path, name)
    case, kinds = CASES[name], dict(ModelConfig.from_pretrained(path, packed=True).kept_types)
    assert len(expected) == 7
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for part, rows, columns in (
            ("self_attn.q_proj", slice(0, 256), slice(0, 256)),
            ("self_attn.k_proj", slice(37, 91), slice(0, 256)),
            ("mlp.down_proj", slice(0, 256), slice(0, 384)),
            ("mlp.down_proj", slice(5, 200), slice(384, 768)),
            ("mlp.down_proj", slice(0, 256), slice(416, 640)),
            ("mlp.down_proj", slice(0, 256), slice(413, 650)),
        ):
            full = f"model.layers.0.{part}.weight"
            whole = expected[full]
            assert whole.std() > 0.02
            weights = open_checkpoint(path)
            weights.set_dtype(dtype)
            numbers = weights.tensor(full, tuple(whole.shape))[rows, columns]
            assert torch.equal(numbers, whole[rows, columns].to(dtype))
            weights.keep_blocks()
            matrix = Matrix(rows.stop - rows.start + 3, columns.stop - columns.start)
            matrix.prepare(dtype, torch.device("cpu"))
            matrix.load([Slice(weights.tensor(full, tuple(whole.shape)), rows, columns)])
            is_whole = columns.stop - columns.start == whole.shape[1]
            kept = columns.start % 32 == 0 and columns.stop % 32 == 0
            kept = kept and case.kept and (is_whole or not (case.ordered or case.hides_order))
            assert kept == (case.kept and is_kept(kinds[full], columns)) or case.hides_order
            assert (matrix.packed is not None) == kept
            unpacked = matrix.values if matrix.packed is None else matrix.packed[:]
            assert unpacked is not None
            assert torch.equal(unpacked[:-3], numbers)
            assert not unpacked[-3:].any()
            if matrix.packed is not None:
                assert torch.equal(matrix.packed[7:31], numbers[7:31])
            indices = torch.tensor([3, len(numbers) - 1, 3])
            assert torch.equal(matrix.select(indices), numbers[indices])


@EVERY_CASE
def test_logits_are_those_of_whole_matrices(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    path, expected = converted(checkpoint, tmp_path, name)
    tokens = random_tokens(60)
    packed, whole = (
        packed_model(path, "float32"),
        load_model(path, TensorParallelGroup(), "float32"),
    )
    assert torch.equal(all_logits(packed, tokens), all_logits(whole, tokens))
    # transformers, with the weights of the formula
    reference = AutoModelForCausalLM.from_pretrained(checkpoint(**ONE_LAYER), dtype=torch.float32)
    missing = reference.load_state_dict(expected, strict=False).unexpected_keys
    assert not missing
    with torch.inference_mode():
        logits = reference(tokens[None]).logits[0]
    torch.testing.assert_close(all_logits(whole, tokens), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", slow_except([1, 2, 4], 1))
@EVERY_CASE
def test_bytes_are_those_that_a_plan_counts(
    checkpoint: Checkpoints, tmp_path: Path, name: str, ranks: int
) -> None:
    sizes_4 = {"num_key_value_heads": 4, "intermediate_size": 1792}
    path, _ = converted(checkpoint, tmp_path, name, **sizes_4)
    case = CASES[name]
    for rank in range(ranks):
        model = packed_model(path, "bfloat16", TensorParallelGroup(rank, ranks))
        sizes = weight_sizes(model.config, ranks, 2, rank)
        assert sizes.cut == (2 if case.ordered and ranks > 1 else 0)
        if name in ("gptq with static groups", "compressed int4 whose order is not set"):
            # their columns are in order, which no config says
            assert 0 <= sizes.nbytes + sizes.scratch - parameter_bytes(model) <= 8 * 8 * 1792
        elif not case.hides_order:
            assert parameter_bytes(model) == sizes.nbytes + sizes.scratch
        elif ranks == 1:
            assert parameter_bytes(model) == sizes.nbytes + sizes.scratch + 8 * (6 * 256 + 1792)
    assert ModelConfig.from_name(str(path), packed=True) == ModelConfig.from_pretrained(
        path, packed=True
    )


def logits_on_this_rank(path: Path) -> Tensor:
    group = TensorParallelGroup.from_environment("cpu")
    return all_logits(packed_model(path, "float32", group), random_tokens(60))


@pytest.mark.parametrize(
    "name", slow_except(["awq", "gptq in order of activations", "fp8 in blocks"])
)
def test_two_ranks_equal_one(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    path, _ = converted(checkpoint, tmp_path, name)
    alone = all_logits(load_model(path, TensorParallelGroup(), "float32"), random_tokens(60))
    for logits in run_ranks(2, logits_on_this_rank, path):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def write_whole(quantised: Path, out: Path, expected: dict[str, Tensor]) -> Path:
    """Write the same model with these weights in float32, and return its folder."""
    shutil.copytree(quantised, out)
    path = out / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    tensors = load_file(out / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if each.dtype != torch.int32}
    kept = {name: each for name, each in kept.items() if not name.endswith("scales")}
    save_file(kept | expected, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("method", ["gptq", "awq", "gptq in order of activations"])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3_moe", "mixtral", "olmo2"])
def test_families(checkpoint: Checkpoints, tmp_path: Path, family: str, method: str) -> None:
    """With biases that are not zero, stacked projections and experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 64
    folder = checkpoint(family, **sizes)
    names = (*PROJECTIONS, "qkv_proj", "gate_up_proj", "w1", "w2", "w3")
    case = CASES[method]
    path = tmp_path / "model"
    expected = quantise(folder, path, case.config, case.convert(), names)
    whole = write_whole(path, tmp_path / "whole", expected)
    tokens = random_tokens(40)
    logits = all_logits(load_model(whole, TensorParallelGroup(), "float32"), tokens)
    assert torch.equal(
        all_logits(load_model(path, TensorParallelGroup(), "float32"), tokens), logits
    )
    packed = packed_model(path, "float32")
    assert packed.layers[0].attention.qkv.weight.packed is not None
    assert torch.equal(all_logits(packed, tokens), logits)
    sizes_of = weight_sizes(packed.config, 1, 4, 0)
    assert parameter_bytes(packed) == sizes_of.nbytes + sizes_of.scratch


def test_transformers_computes_the_same_fp8_weights(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path, expected = converted(checkpoint, tmp_path, "fp8 in blocks")
    config = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.float32
    )
    weights = dict(reference.named_parameters())
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight)
    tokens = random_tokens(60)
    with torch.inference_mode():
        logits = reference(tokens[None]).logits[0]
    ours = all_logits(packed_model(path, "float32"), tokens)
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not HAS_LIBRARY, reason="needs Python 3.11")
@pytest.mark.parametrize("name", ["compressed int4 with zeros", "compressed fp8 of rows"])
def test_transformers_computes_the_same_compressed_weights(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    path, _ = converted(checkpoint, tmp_path, name)
    config = CompressedTensorsConfig(**CASES[name].config, dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16
    )
    weights = dict(reference.named_parameters())
    model = load_model(path, TensorParallelGroup(), "bfloat16")
    down = model.layers[0].mlp.down.weight.values
    assert down is not None
    assert torch.equal(down, weights["model.layers.0.mlp.down_proj.weight"])


def write(folder: Path, modules: dict[str, Expected]) -> dict[str, Tensor]:
    """Write only these modules, and return their weights."""
    tensors = {
        f"{module}.{suffix}": part.contiguous()
        for module, (parts, _) in modules.items()
        for suffix, part in parts.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return {f"{module}.weight": weight for module, (_, weight) in modules.items()}


def check(folder: Path, config: dict[str, Any], expected: dict[str, Tensor]) -> None:
    checkpoint = GroupCheckpoint(folder, Quantisation.parse(config))
    for name, weight in expected.items():
        assert torch.equal(checkpoint.tensor(name, tuple(weight.shape))[:], weight)
        assert torch.equal(checkpoint.tensor(name, tuple(weight.shape))[3:6], weight[3:6])


def random_weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.1


@pytest.mark.skipif(not HAS_LIBRARY, reason="needs Python 3.11")
def test_compressed_tensors_of_mixed_precision(tmp_path: Path) -> None:
    """Each matrix has the bits and the group that fit it, of those in the config."""
    weights = {
        "int4": {"type": "int", "num_bits": 4, "symmetric": True, **GROUPS},
        "large": {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group"}
        | {"group_size": 128},
        "int8": {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"},
        "fp8": {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"},
    }
    layouts = {"fp8": "float-quantized", "int8": "int-quantized"}
    schemes = {
        name: {"format": layouts.get(name, "pack-quantized"), "weights": each}
        for name, each in weights.items()
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    expected = write(
        tmp_path,
        {name: compressed(scheme)(random_weight(64, 384)) for name, scheme in schemes.items()},
    )
    groups = {name: {"targets": ["Linear"], **scheme} for name, scheme in schemes.items()}
    check(tmp_path, {**config, "config_groups": groups}, expected)


def test_exceptions_of_a_config(tmp_path: Path) -> None:
    """Of GPTQModel and AutoRound; groups need not divide the columns."""
    modules = {
        "usual": gptq(4, 128)(random_weight(64, 160)),
        "other": gptq(8, 32, permuted=True)(random_weight(64, 160)),
    }
    expected = write(tmp_path, modules)
    config = {"bits": 4, "group_size": 128}
    other = {"bits": 8, "group_size": 32}
    for fields in (
        {"quant_method": "gptq", "dynamic": {"+:.*other.*": other, "-:.*head.*": {}}},
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:gptq",
            "extra_config": {"other": other, "head": {"bits": 16}},
        },
    ):
        check(tmp_path, {**config, **fields}, expected)
    with pytest.raises(CheckpointError, match=r"qzeros of shape \(5, 16\) instead of \(5, 8\)"):
        check(tmp_path, {"quant_method": "gptq", **config}, expected)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_bytes_beside_words(tmp_path: Path, method: str) -> None:
    """FP8 matrices in a file whose config describes others."""
    scales = fp8((-1, -1), torch.float32, "weight_scale", "tensor")
    rows = fp8((1, -1), torch.float32, "weight_scale", "row")
    expected = write(
        tmp_path, {"a": scales(random_weight(64, 64)), "b": rows(random_weight(64, 32))}
    )
    check(tmp_path, words(method), expected)


def test_rows_that_do_not_fill_words(tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (64, 16), generator=torch.Generator().manual_seed(0))
    scale, zero = torch.rand(1, 12).half(), torch.randint(0, 16, (1, 16))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": pack(codes, 4, order), "qzeros": pack(zero, 4, order), "scales": scale}
    weight = ((codes - zero)[:, :12] * scale.float()).t()
    expected = write(tmp_path, {"a": (parts, weight)})
    check(tmp_path, words("awq"), expected)
    parts = {**parts, "qweight": parts["qweight"][:, :1]}
    write(tmp_path, {"a": (parts, weight)})
    with pytest.raises(CheckpointError, match=r"qweight of shape \(64, 1\) instead of \(64, 2\)"):
        check(tmp_path, words("awq"), expected)


def test_zero_points_that_carry(tmp_path: Path) -> None:
    """GPTQModel subtracts ones from whole words: a zero point of 0 borrows from its neighbour."""
    parts, _ = gptq(group=64)(random_weight(16, 64))
    zero = torch.tensor([[0, 5, 0, 15, 1, 0, 0, 8, 0, 0, 3, 4, 5, 6, 7, 0]])
    parts["qzeros"] = pack(zero, 4) - 0x11111111
    codes = torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(1))
    parts["qweight"] = pack(codes, 4).t()
    weight = (codes - zero.t()) * parts["scales"].t().float()
    check(tmp_path, words("gptq"), write(tmp_path, {"a": (parts, weight)}))
