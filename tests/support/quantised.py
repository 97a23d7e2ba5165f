"""Conversion of Hugging Face checkpoints to quantised ones, as their libraries write them.

Packing follows the libraries' own code: `WQLinear_GEMM.from_linear` of AutoAWQ, `pack` of AutoGPTQ
and GPTQModel. compressed-tensors packs by itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Expected = tuple[Tensors, Tensor]  # a module's tensors by suffix, and its weights in float32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # rows of each eight, from the lowest bits of a word


def quantise(
    folder: Path,
    out: Path,
    config: dict[str, Any] | None,
    convert: Callable[[Tensor], Expected],
    names: tuple[str, ...] = PROJECTIONS,
) -> Tensors:
    """Write a copy of a checkpoint whose projections are quantised, but for stacks of experts.

    Args:
        folder: the checkpoint, of one safetensors file.
        out: the folder to write.
        config: the `quantization_config`, if config.json has one.
        convert: quantises a matrix (N, K).
        names: of modules that are quantised.

    Returns:
        the weights of the quantised matrices in float32, by name.
    """
    shutil.copytree(folder, out)
    fields = json.loads((out / "config.json").read_text())
    if config is not None:
        fields["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(fields))
    tensors: Tensors = {}
    expected: Tensors = {}
    for name, tensor in load_file(out / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in names and name != module and tensor.dim() == 2:
            parts, expected[name] = convert(tensor.float())
            tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return expected


def pack(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Return codes (R, n) packed along rows into words (R, n * bits / 32) int32."""
    count = 32 // bits
    words = torch.zeros(len(codes), codes.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        own = codes[:, (place if order is None else order[place]) :: count].long()
        words |= own << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def asymmetric(
    weight: Tensor,
    bits: int,
    group: int,
    g_idx: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (N, K), and the scales and zero points (N, G) of groups, from their range."""
    columns = weight.shape[1]
    groups = torch.arange(columns) // group if g_idx is None else g_idx
    scales, zeros = [], []
    for index in range(int(groups.max()) + 1):
        own = weight[:, groups == index]
        low, high = own.amin(1).clamp(max=-1e-4), own.amax(1).clamp(min=1e-4)
        scale = ((high - low) / (2**bits - 1)).to(dtype).float()
        scales.append(scale)
        zeros.append((-low / scale).round().clamp(1, 2**bits - 1))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, 2**bits - 1)
    return codes, scale.to(dtype), zero


def gptq(
    bits: int = 4,
    group: int = 64,
    is_v1: bool = True,
    permuted: bool = False,
    has_bias: bool = False,
) -> Callable[[Tensor], Expected]:
    """Return a conversion to GPTQ; with `permuted`, as desc_act without static groups makes it."""

    def convert(weight: Tensor) -> Expected:
        rows, columns = weight.shape
        size = columns if group < 0 else group
        g_idx = torch.arange(columns) // size
        if permuted:
            generator = torch.Generator().manual_seed(rows + columns)
            g_idx = g_idx[torch.randperm(columns, generator=generator)]
        codes, scale, zero = asymmetric(weight, bits, size, g_idx)
        parts = {
            "qweight": pack(codes, bits).t(),
            "qzeros": pack(zero.t() - int(is_v1), bits),
            "scales": scale.t(),
            "g_idx": g_idx.to(torch.int32),
        }
        if has_bias:
            parts["bias"] = torch.zeros(rows, dtype=torch.float16)
        return parts, (codes - zero[:, g_idx]) * scale.float()[:, g_idx]

    return convert


def ordered_words(group: int = 64, is_set: bool = True) -> Callable[[Tensor], Expected]:
    """Return a conversion to compressed-tensors' former act-order, `group`; perhaps not set."""

    def convert(weight: Tensor) -> Expected:
        rows, columns = weight.shape
        g_idx = torch.arange(columns) // group
        if is_set:
            generator = torch.Generator().manual_seed(rows + columns)
            g_idx = g_idx[torch.randperm(columns, generator=generator)]
        codes, scale, zero = asymmetric(weight, 4, group, g_idx)
        parts = {
            "weight_packed": pack(codes, 4),
            "weight_scale": scale,
            "weight_zero_point": (zero - 8).to(torch.int8),
            "weight_shape": torch.tensor([rows, columns]),
            "weight_g_idx": (g_idx if is_set else torch.full((columns,), -1)).to(torch.int32),
        }
        return parts, (codes - zero[:, g_idx]) * scale.float()[:, g_idx]

    return convert


def awq(group: int = 64) -> Callable[[Tensor], Expected]:
    """Return a conversion to AWQ's GEMM format."""

    def convert(weight: Tensor) -> Expected:
        groups = torch.arange(weight.shape[1]) // group
        codes, scale, zero = asymmetric(weight, 4, group)
        parts = {
            "qweight": pack(codes.t(), 4, _AWQ_ORDER),
            "qzeros": pack(zero.t(), 4, _AWQ_ORDER),
            "scales": scale.t(),
        }
        return parts, (codes - zero[:, groups]) * scale.float()[:, groups]

    return convert


def fp8(
    block: tuple[int, int], scale_dtype: torch.dtype, suffix: str, shape: str = "block"
) -> Callable[[Tensor], Expected]:
    """Return a conversion to e4m3 with a scale per block, whose sides may be -1 for all.

    `shape`: block; or row or tensor, whose scales have fewer dimensions.
    """

    def convert(weight: Tensor) -> Expected:
        rows, columns = (
            size if side < 0 else side for side, size in zip(block, weight.shape, strict=True)
        )
        first, second = (
            torch.arange(size) // side
            for size, side in zip(weight.shape, (rows, columns), strict=True)
        )
        scale = torch.zeros(int(first[-1]) + 1, int(second[-1]) + 1)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                own = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scale[i, j] = own.abs().max() / 448
        if scale_dtype == torch.float8_e8m0fnu:
            scale = scale.log2().ceil().exp2()
        scale = scale.to(scale_dtype)
        spread = scale.float()[first][:, second]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {"block": scale, "row": scale.flatten(), "tensor": scale.flatten()[0]}[shape]
        return {"weight": codes, suffix: stored}, codes.float() * spread

    return convert


def compressed(
    scheme: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Callable[[Tensor], Expected]:
    """Return a conversion by compressed-tensors, with weights as `scheme` says.

    The weights are those of the library's own decompression, in float32.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    parsed = QuantizationScheme(targets=["Linear"], weights=scheme["weights"])
    compressor = BaseCompressor.get_value_from_registry(scheme["format"])
    args = parsed.weights
    assert args is not None

    def convert(weight: Tensor) -> Expected:
        if args.strategy == "block":
            rows, columns = args.block_structure
            blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            size = args.group_size or weight.shape[1]
            groups = weight.unflatten(1, (-1, size))
            low, high = groups.amin(2), groups.amax(2)
            if args.strategy == "tensor":
                low, high = low.amin()[None], high.amax()[None]
        scale, zero = calculate_qparams(low, high, args)
        scale = scale.to(dtype)
        parts = compressor.compress(
            {"weight": weight.to(dtype), "weight_scale": scale, "weight_zero_point": zero}, parsed
        )
        stored = {"weight_scale": scale} | {k: v for k, v in parts.items() if v is not None}
        whole = {**stored, "weight_scale": scale.float()}
        return stored, compressor.decompress(whole, parsed)["weight"].float()

    return convert
