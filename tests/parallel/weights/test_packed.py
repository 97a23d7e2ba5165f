"""Packed matrices hold the weights of their file, bit for bit, and multiply as whole ones do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

import parallel.weights.packed
import parallel.weights.planes
from parallel.batch_invariant import batch_invariant
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import single_branches
from parallel.config.weight_sizes import weight_sizes
from parallel.errors import CheckpointError
from parallel.formats.gguf.checkpoint import GgufCheckpoint
from parallel.formats.gguf.header import read_header
from parallel.formats.gguf.tensors import CODEBOOK_TYPES
from parallel.formats.plane_format import PLANE_FORMATS, group_format, kept_type, kept_unit
from parallel.model.loading import load_model, parameter_bytes
from parallel.model.moe import SharedExpert
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.codebooks import CodebookBlocks
from parallel.weights.matrix import Matrix, Scratch
from parallel.weights.packed import PackedRows, Slice, WholePart
from parallel.weights.planes import Planes, ReorderedPlanes
from parallel.weights.selection import random_planes
from support.gguf import RANDOM, convert
from support.interpreter import import_interpreted
from support.loading import all_logits
from support.models import MAMBA, WIDE, random_tokens
from support.quantised import fp8, gptq, quantise
from support.ranks import run_ranks
from support.slow import slow_except

Checkpoints = Callable[..., Path]
KEPT = [*PLANE_FORMATS, *CODEBOOK_TYPES]
EVERY_TYPE = pytest.mark.parametrize("name", KEPT)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether tensors are equal bit for bit, signs of zeros included."""
    size = {2: torch.int16, 4: torch.int32}[x.itemsize]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(size), y.contiguous().view(size))


def packed_model(path: Path, dtype: str, group: TensorParallelGroup | None = None) -> Transformer:
    config = ModelConfig.from_pretrained(path, packed=True)
    assert config.kept_types
    return load_model(path, group or TensorParallelGroup(), dtype, config)


def load_matrix(checkpoint: GgufCheckpoint, name: str, shape: tuple[int, int], *part: slice) -> Any:
    """Return rows and columns of a tensor as a Matrix, with 3 rows of padding."""
    rows, columns = part
    matrix = Matrix(rows.stop - rows.start + 3, columns.stop - columns.start)
    matrix.prepare(checkpoint._target_dtype, torch.device("cpu"))
    matrix.load([Slice(checkpoint.tensor(name, shape), rows, columns)])
    return matrix


@EVERY_TYPE
@pytest.mark.parametrize("dtype", slow_except(DTYPES, 1))
def test_weights_are_those_of_gguf(
    checkpoint: Checkpoints, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Whole matrices, and both ranks' slices."""
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", Kind[name])
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = GgufCheckpoint(path)
    weights.set_dtype(dtype)
    weights.keep_blocks()
    for part, tensor, slices in (
        ("attn_q", "self_attn.q_proj", [(slice(0, 256), slice(0, 256))]),
        ("attn_q", "self_attn.q_proj", [(slice(10, 70), slice(0, 256))]),
        ("attn_k", "self_attn.k_proj", [(slice(64, 128), slice(0, 256))]),
        ("ffn_gate", "mlp.gate_proj", [(slice(384, 768), slice(0, 256))]),
        ("ffn_down", "mlp.down_proj", [(slice(0, 256), slice(0, 384))]),
        ("ffn_down", "mlp.down_proj", [(slice(0, 256), slice(384, 768))]),
        ("ffn_down", "mlp.down_proj", [(slice(0, 256), slice(416, 512))]),
    ):
        raw = stored[f"blk.1.{part}.weight"]
        whole = torch.from_numpy(dequantize(raw.data, raw.tensor_type).copy())
        assert whole.std() > 0.005
        for rows, columns in slices:
            matrix = load_matrix(
                weights, f"model.layers.1.{tensor}.weight", tuple(whole.shape), rows, columns
            )
            expected = whole[rows, columns].to(dtype)
            kind = kept_type(name)
            assert kind is not None
            unit = kept_unit(kind)
            is_kept = not (columns.start % unit or columns.stop % unit)
            assert (matrix.packed is not None) == is_kept
            unpacked = matrix.packed[:] if is_kept else matrix.values
            assert same_bits(unpacked[:-3], expected)
            assert not unpacked[-3:].any()
            indices = torch.tensor([3, len(expected) - 1, 3])
            assert same_bits(matrix.select(indices), expected[indices])
            if is_kept:
                assert same_bits(matrix.packed[7:31], expected[7:31])


@EVERY_TYPE
@pytest.mark.parametrize("tied", slow_except([False, True]))
def test_logits_are_those_of_whole_matrices(
    checkpoint: Checkpoints, tmp_path: Path, name: str, tied: bool
) -> None:
    path = convert(
        checkpoint(**WIDE, tie_word_embeddings=tied), tmp_path / "model.gguf", Kind[name]
    )
    tokens = random_tokens(60)
    packed = packed_model(path, "float32")
    assert not any(each.is_floating_point() and each.numel() > 1e5 for each in packed.parameters())
    whole = load_model(path, TensorParallelGroup(), "float32")
    assert torch.equal(all_logits(packed, tokens), all_logits(whole, tokens))


def logits_on_this_rank(path: Path) -> Tensor:
    group = TensorParallelGroup.from_environment("cpu")
    return all_logits(packed_model(path, "float32", group), random_tokens(60))


@pytest.mark.parametrize("name", slow_except(["Q4_K", "Q5_1", "IQ3_S"]))
def test_two_ranks_equal_one(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", Kind[name])
    alone = all_logits(load_model(path, TensorParallelGroup(), "float32"), random_tokens(60))
    for logits in run_ranks(2, logits_on_this_rank, path):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", slow_except([1, 2, 4], 1))
@pytest.mark.parametrize("tied", [False, True])
@EVERY_TYPE
def test_bytes_are_those_that_a_plan_counts(
    checkpoint: Checkpoints, tmp_path: Path, name: str, ranks: int, tied: bool
) -> None:
    sizes_4 = {**WIDE, "num_key_value_heads": 4, "intermediate_size": 1792, "num_hidden_layers": 1}
    folder = checkpoint(**sizes_4, tie_word_embeddings=tied)
    path = convert(folder, tmp_path / "model.gguf", Kind[name])
    nbytes = cut = 0
    for rank in range(ranks):
        model = packed_model(path, "bfloat16", TensorParallelGroup(rank, ranks))
        sizes = weight_sizes(model.config, ranks, 2, rank)
        assert parameter_bytes(model) == sizes.nbytes + sizes.scratch
        assert sum(parameter.nbytes for parameter in model.parameters()) == sizes.nbytes
        nbytes, cut = max(nbytes, sizes.nbytes + sizes.scratch), max(cut, sizes.cut)
        # a rank's 896 or 448 columns of `down`, and its 128 or 64 of `o`, are no blocks of 256
        has_blocks = ranks == 1 or name not in CODEBOOK_TYPES
        assert sizes.cut == (0 if has_blocks else 2)
        embedding = model.embed.weight
        assert embedding.packed is not None
        own = sum(plane.nbytes for plane in embedding.packed.parameters())
        assert sizes.embedding == (0 if tied else own)
    largest = weight_sizes(model.config, ranks, 2)
    assert (largest.nbytes + largest.scratch, largest.cut) == (nbytes, cut)


WIDE_LATENTS: dict[str, Any] = {
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 256,
    "v_head_dim": 64,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
}
WIDE_MAMBA: dict[str, Any] = {
    **MAMBA,
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "decoder_sparse_step": 1, "moe_intermediate_size": 512},
    "mixtral": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "exaone4": {"head_dim": 64, "layer_types": ["full_attention"] * 2},
    "ministral3": {"head_dim": 64},
    "seed_oss": {"head_dim": 64},
    "deepseek_v2": {**WIDE_LATENTS, "q_lora_rank": None},
    "deepseek_v3": {**WIDE_LATENTS, "q_lora_rank": 256, "first_k_dense_replace": 1},
    "arcee": {},
    "ernie4_5": {"head_dim": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 512, "moe_num_shared_experts": 1},
    "glm4_moe": {"moe_intermediate_size": 512, "n_group": 1, "topk_group": 1},
    "glm4": {"head_dim": 64},
    "granitemoehybrid": WIDE_MAMBA,
    "granitemoehybrid-experts": {
        **WIDE_MAMBA,
        "mamba_n_groups": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_head_dim": 64,
        "mamba_num_heads": 8,
        "head_dim": 64,
    },
    "nemotron_h-experts": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe"],
        "mamba_head_dim": 64,
        "mamba_num_heads": 8,
        "head_dim": 64,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512,
    },
}


@pytest.mark.parametrize("ranks", slow_except([1, 2], 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_gguf_files_stays_packed(
    checkpoint: Checkpoints, tmp_path: Path, family: str, ranks: int
) -> None:
    """Matrices fused or not, and those of experts."""
    folder = checkpoint(family=family.partition("-")[0], **{**WIDE, **FAMILIES[family]})
    path = convert(folder, tmp_path / "model.gguf", Kind.Q4_K)
    group = TensorParallelGroup(ranks - 1, ranks)
    model, whole = packed_model(path, "bfloat16", group), load_model(path, group, "bfloat16")
    sizes = weight_sizes(model.config, ranks, 2, group.rank)
    assert parameter_bytes(model) == sizes.nbytes + sizes.scratch
    assert sizes.nbytes < parameter_bytes(whole)
    modules = dict(whole.named_modules())
    packed = 0
    for name, module in model.named_modules():
        if isinstance(module, Matrix) and module.packed is not None:
            packed += 1
            assert same_bits(module.packed[:], modules[name].values)
    shared = sum(isinstance(each, SharedExpert) for each in model.modules())
    per_layer = 4 if model.config.latent is None else 5
    single = 2 * single_branches(model.config)
    assert packed == 2 + model.config.layers * per_layer + 2 * shared - single
    if ranks == 1:
        models = packed_model(path, "float32"), load_model(path, group, "float32")
        logits = [all_logits(each, random_tokens(40)) for each in models]
        assert torch.equal(*logits)


@pytest.mark.parametrize("method", ["gptq", "act-order", "fp8"])
@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_interleaved_heads_are_reordered_in_every_format(
    checkpoint: Checkpoints, tmp_path: Path, family: str, method: str
) -> None:
    """Rows of packed matrices move as those of whole ones, which are checked with transformers."""
    folder = checkpoint(family=family, head_dim=64, **WIDE)
    if method == "fp8":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        quantise(folder, tmp_path / "q", config, fp8((128, 128), torch.float32, "weight_scale_inv"))
    else:
        is_permuted = method == "act-order"
        config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": is_permuted}
        quantise(folder, tmp_path / "q", config, gptq(permuted=is_permuted))
    packed = packed_model(tmp_path / "q", "float32")
    whole = load_model(tmp_path / "q", TensorParallelGroup(), "float32")
    tokens = random_tokens(60)
    assert torch.equal(all_logits(packed, tokens), all_logits(whole, tokens))
    unquantised = load_model(folder, TensorParallelGroup(), "float32")
    matrices = dict(unquantised.named_modules())
    for name, module in whole.named_modules():
        if name.endswith("qkv.weight"):
            torch.testing.assert_close(module.values, matrices[name].values, atol=0.03, rtol=0)


def test_matrices_take_hardly_more_than_in_their_file(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for name in KEPT:
        path = convert(checkpoint(**WIDE), tmp_path / f"{name}.gguf", Kind[name])
        stored = path.stat().st_size - read_header(path).data_start
        assert (
            weight_sizes(ModelConfig.from_name(str(path), packed=True), 1, 2).nbytes <= 1.1 * stored
        )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "second"),
    [("Q4_0", 0), ("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 0), ("Q2_K", 0), ("Q2_K", 2), ("IQ3_XXS", 0)],
)
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_that_are_not_finite(
    checkpoint: Checkpoints, tmp_path: Path, name: str, second: int, scale: float, packed: bool
) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", Kind[name])
    content = bytearray(path.read_bytes())
    offset = read_header(path).tensors["blk.1.ffn_gate.weight"].start + RANDOM_OFFSETS.get(name, 0)
    offset += second
    content[offset : offset + 2] = np.float16(scale).tobytes()
    path.write_bytes(content)
    message = r"tensor blk\.1\.ffn_gate\.weight has a scale that is not finite: the file is broken"
    config = ModelConfig.from_pretrained(path, packed=packed)
    with pytest.raises(CheckpointError, match=message):
        load_model(path, TensorParallelGroup(), "float32", config)


RANDOM_OFFSETS = {kind.name: offset for kind, (offset, _) in RANDOM.items()}


def test_a_layer_is_unpacked_once_for_all_chunks_of_a_prefill(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", Kind.Q4_K)
    model = packed_model(path, "float32")
    unpacked = []
    unpack = Planes.unpack
    monkeypatch.setattr(
        Planes, "unpack", lambda self, *args: unpacked.append(self) or unpack(self, *args)
    )
    layer = model.layers[0].mlp.gate_up
    x = torch.randn(5, 256)
    with torch.inference_mode():
        outs = [torch.cat(layer(x), dim=1) for _ in range(3)]
        assert len(unpacked) == 1
        assert torch.equal(outs[0], outs[2])
        model.layers[1].mlp.gate_up(x)  # in the same memory
        assert len(unpacked) == 2
        assert torch.equal(torch.cat(layer(x), dim=1), outs[0])
        assert len(unpacked) == 3


def test_a_matrix_of_several_types(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Stacked matrices of other types each keep their own, as in a file of Q4_K_M."""
    files = {
        name: convert(checkpoint(**WIDE), tmp_path / f"{name}.gguf", Kind[name])
        for name in ("Q4_K", "Q6_K", "F16", "IQ2_XS")
    }
    slices, expected = [], []
    for name, part in (
        ("Q4_K", "gate"),
        ("Q6_K", "up"),
        ("Q6_K", "gate"),
        ("F16", "up"),
        ("IQ2_XS", "gate"),
    ):
        weights = GgufCheckpoint(files[name])
        weights.keep_blocks()
        tensor = weights.tensor(f"model.layers.0.mlp.{part}_proj.weight", (768, 256))
        slices.append(Slice(tensor, slice(0, 100), slice(0, 256)))
        expected.append(tensor[:100])
    matrix = Matrix(500, 256)
    matrix.load(slices)
    assert matrix.packed is not None
    assert [part.rows for part in matrix.packed.parts] == [100, 200, 100, 100]
    whole = torch.cat(expected)
    assert torch.equal(matrix.packed[:], whole)
    assert torch.equal(matrix.packed[50:350], whole[50:350])
    x, bias = torch.randn(5, 256), torch.randn(350)
    assert torch.equal(
        matrix.product(x, bias, 150), torch.nn.functional.linear(x, whole[150:], bias)
    )
    assert torch.equal(matrix.logits(x), torch.nn.functional.linear(x, whole))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let products of planes in float16 use the kernels in triton's interpreter, as on a GPU."""
    kernels = import_interpreted("parallel.weights.kernels")
    monkeypatch.setattr(
        parallel.weights.packed,
        "plane_kernels",
        lambda device, dtype, name: (kernels if dtype == torch.float16 else None, ""),
    )
    return kernels


def matrix_of(rows: int, columns: int, *parts: Any) -> tuple[Any, Tensor]:
    """Return a matrix of parts in float16, and its weights in float64."""
    matrix: Any = Matrix(rows, columns)
    matrix.prepare(torch.float16, torch.device("cpu"))
    matrix.values = None
    matrix.packed = PackedRows(columns, torch.float16, torch.device("cpu"))
    matrix.packed.parts.extend(parts)
    return matrix, matrix.packed[:].double()


def test_products_with_kernels(interpreted: Any) -> None:
    planes = [
        random_planes(PLANE_FORMATS[name], 30, 96, 2, torch.device("cpu"), seed)
        for seed, name in enumerate(("Q4_K", "Q6_K"))
    ]
    whole = WholePart(torch.nn.Parameter(torch.randn(10, 96).half(), requires_grad=False))
    matrix, weights = matrix_of(70, 96, planes[0], whole, planes[1])
    assert matrix.packed.kernels is interpreted
    bias = torch.randn(70).half() * 8
    for count in (1, 5, 64):
        x = torch.randn(count, 96).half()
        for first in (0, 7, 35, 45):
            exact = x.double() @ weights[first:].t()
            out = matrix.product(x, None, first)
            torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=1e-3)
            with_bias = matrix.product(x, bias[first:], first)  # rounded once
            sums = (exact + bias[first:].double()).half()
            assert (with_bias != sums).float().mean() < 0.02
        logits = matrix.logits(x)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), x.double() @ weights.t(), rtol=1e-4, atol=1e-4)


def test_columns_in_an_order_of_their_own(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels multiply in the planes' order; unpacked, columns have their own order again."""
    fmt = group_format("int4", 32, "float16", has_zero=True)
    assert fmt is not None
    device = torch.device("cpu")
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    planes = [random_planes(fmt, 30, 96, 0, device, seed) for seed in (1, 2)]
    sorted_rows = planes[1].unpack(slice(None), torch.empty(30, 96, dtype=torch.float16))
    reordered = ReorderedPlanes(planes[1], order)
    monkeypatch.setattr(parallel.weights.planes, "_UNPACKED", 7 * 96)  # several steps
    expected = torch.empty_like(sorted_rows)
    expected[:, order] = sorted_rows
    matrix, weights = matrix_of(60, 96, planes[0], reordered)
    assert torch.equal(weights[30:].half(), expected)
    indices = torch.tensor([29, 0, 3, 3, 8, 9, 10, 11])
    assert torch.equal(reordered.unpack(indices, torch.empty(8, 96).half()), expected[indices])
    plain = reordered.unpack(slice(4, 30), torch.empty(26, 96).half())
    assert torch.equal(plain, expected[4:])
    x = torch.randn(5, 96).half()
    for first in (0, 40):
        exact = x.double() @ weights[first:].t()
        out = matrix.product(x, None, first).double()
        torch.testing.assert_close(out, exact, rtol=2e-3, atol=1e-3)


def test_which_products_use_kernels(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to MAX_ROWS, logits always, and in batch-invariant forwards in parts of MAX_ROWS."""
    multiply = interpreted.multiply
    counts: list[int] = []

    def count_rows(x: Tensor, *args: Any) -> Tensor:
        counts.append(len(x))
        product: Tensor = multiply(x, *args)
        return product

    monkeypatch.setattr(interpreted, "multiply", count_rows)
    matrix, weights = matrix_of(
        30, 64, random_planes(PLANE_FORMATS["Q5_0"], 30, 64, 0, torch.device("cpu"))
    )
    x = torch.randn(130, 64).half()
    matrix.product(x[:64])
    matrix.product(x[:65])
    matrix.logits(x[:65])
    with batch_invariant():
        out = matrix.product(x)
    assert counts == [64, 64, 1, 64, 64, 2]
    torch.testing.assert_close(out.double(), x.double() @ weights.t(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "count"), [("Q4_K", 1), ("Q2_K", 2)])
def test_unpacked_matrices_are_not_reused_where_graphs_may_overwrite_them(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """On a GPU, a captured forward unpacks what has no kernels into the same memory."""
    part: Any = CodebookBlocks("Q2_K", 4, 256, torch.device("cpu"))
    part.clear(slice(None))
    if name == "Q4_K":
        part = random_planes(PLANE_FORMATS["Q4_K"], 4, 256, 0, torch.device("cpu"))
    matrix, _ = matrix_of(4, 256, part)
    scratch = Scratch()
    scratch.reserve("o", matrix)
    matrix.device = torch.device("cuda")  # only asked for its type
    scratch.reserve("o", matrix)
    unpack, unpacked = matrix.packed.unpack, []
    monkeypatch.setattr(
        matrix.packed, "unpack", lambda *args: unpacked.append(args) or unpack(*args)
    )
    for _ in range(2):
        scratch.unpacked(matrix, "o")
    assert len(unpacked) == count


def test_a_model_is_freed_at_once(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = convert(checkpoint(**WIDE), tmp_path / "model.gguf", Kind.Q4_K)
    model: Any = packed_model(path, "float32")
    all_logits(model, random_tokens(10))
    freed = [ref(model.scratch), ref(model.layers[1].mlp.down.weight)]
    gc.disable()
    try:
        del model
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()
