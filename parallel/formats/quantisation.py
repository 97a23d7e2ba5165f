"""What a checkpoint's files say about how its weights are quantised.

Does not import torch, since a plan has to be fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.regular_files import read_json
from parallel.formats.weight_headers import has_only_floats

FIELD = "quantization_config"  # in config.json
# Fields of config.json and files beside it that say how weights are quantised if FIELD does not:
# those of MLX, of older versions of the libraries, and NVIDIA's (FP8, NVFP4).
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
READABLE = "a GGUF file, or an AWQ, GPTQ, compressed-tensors, FP8 or 16-bit checkpoint"
_NAMES = {  # display names of methods that are not supported
    "aqlm": "AQLM",
    "bitblas": "BitBLAS",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "hqq": "HQQ",
    "mlx": "MLX",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_AUTO_ROUND = {  # packing formats of AutoRound, and the methods whose files they make
    "auto_round:auto_awq": "awq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PER_GROUP = ("mixed-precision", "dense")  # the formats are those of the groups of layers


class UnsupportedQuantisation(Exception):
    """Weights are quantised in a way that is not supported; the message says which."""


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are quantised, for whatever its tensors do not tell."""

    method: str  # awq, gptq, compressed-tensors or fp8
    group: int | None = None  # columns that share a scale, if all matrices have the same
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    bits: tuple[int, ...] = ()  # sizes of codes in words of 32 bits
    has_order: bool = False  # columns of a group may lie anywhere in a row (act-order)
    is_zero_less_one: bool = False  # zero points are stored less 1

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Quantisation:
        """Return what a `quantization_config` says. Raises UnsupportedQuantisation."""
        method = str(config.get("quant_method") or "an unknown method").lower()
        parse = _PARSERS.get(method)
        if parse is None:
            raise UnsupportedQuantisation(_NAMES.get(method, method[:40]))
        try:
            return parse(config)
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedQuantisation(f"{method} with an unreadable config") from error


def quantisation_fields(fields: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return a model's `quantization_config`; empty if its weights are not quantised.

    Args:
        fields: those of its config.json.
        folder: in which other files may say it, if any. They do not count if all weights there
            are floats.

    Raises OSError and ValueError if such a file cannot be read.
    """
    config = fields.get(FIELD)
    if fields.get("quantization") is not None and not _is_named(config):
        return {"quant_method": "mlx"}
    if config:
        return dict(config) if isinstance(config, Mapping) else {"quant_method": config}
    if isinstance(config := fields.get("compression_config"), Mapping) and config:
        return {"quant_method": "compressed-tensors", **config}
    if folder is None:
        return {}
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None or has_only_floats(folder):
        return {}
    beside = read_json(path)
    if not isinstance(beside, Mapping):
        raise ValueError(f"{path.name} is not a JSON object")
    return _named(beside)


def find_quantisation(folder: Path) -> Quantisation | None:
    """Return how the weights of a folder are quantised; None if they are not.

    Raises UnsupportedQuantisation, OSError and ValueError.
    """
    path = folder / "config.json"
    fields = read_json(path) if path.is_file() else {}
    config = quantisation_fields(fields if isinstance(fields, Mapping) else {}, folder)
    return Quantisation.parse(config) if config else None


def _is_named(config: Any) -> bool:
    return isinstance(config, Mapping) and bool(config.get("quant_method"))


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a file of FILES with the name of its method."""
    if isinstance(inner := config.get("quantization"), Mapping):
        return {"quant_method": "modelopt", **inner}
    is_awq = "w_bit" in config or "q_group_size" in config
    return {"quant_method": "awq" if is_awq else "gptq", **config}


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise UnsupportedQuantisation(f"GPTQ in the format {version:.40}")
    return _words("GPTQ", "gptq", config, version == "gptq")


def _words(
    name: str, method: str, config: Mapping[str, Any], is_zero_less_one: bool
) -> Quantisation:
    """Return the quantisation of a method with codes in words of 32 bits."""
    bits = int(config.get("bits") or config.get("w_bit") or 4)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise UnsupportedQuantisation(f"{name} with {bits} bits")
    if str(config.get("pack_dtype") or "int32") != "int32":
        raise UnsupportedQuantisation(f"{name} packed in {config['pack_dtype']:.20}")
    group = int(config.get("group_size") or config.get("q_group_size") or 128)
    has_exceptions = config.get("dynamic") or config.get("extra_config")
    return Quantisation(
        method,
        group=None if has_exceptions else group,
        bits=(bits,),
        has_order=config.get("desc_act") is True,
        is_zero_less_one=is_zero_less_one,
    )


def _awq(config: Mapping[str, Any]) -> Quantisation:
    version = config.get("version") or config.get("checkpoint_format") or config.get("format")
    version = str(version or "gemm").lower()
    if version != "gemm":
        raise UnsupportedQuantisation(f"AWQ in the format {version:.40}")
    return _words("AWQ", "awq", config, False)


def _auto_round(config: Mapping[str, Any]) -> Quantisation:
    packing = str(config.get("packing_format") or config.get("backend") or "none").lower()
    method = _AUTO_ROUND.get(packing)
    if method is None or config.get("rotation_config"):
        how = "with rotations" if method else f"in the packing format {packing:.40}"
        raise UnsupportedQuantisation(f"AutoRound {how}")
    return _words("AutoRound", method.removesuffix("_v2"), config, method == "gptq")


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    if config.get("transform_config"):
        raise UnsupportedQuantisation("compressed-tensors with transforms")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedQuantisation(f"compressed-tensors in the format {sparsity:.40}")
    shared = str(config.get("format") or "dense")
    schemes = list((config.get("config_groups") or {}).values())
    weights = [scheme["weights"] for scheme in schemes if scheme.get("weights")]
    formats = {str(scheme.get("format") or shared) for scheme in schemes} | {shared}
    for unknown in sorted(formats - {*_COMPRESSED, *_PER_GROUP}):
        raise UnsupportedQuantisation(f"compressed-tensors in the format {unknown:.40}")
    for each in weights:
        kind, bits = str(each.get("type", "int")), int(each.get("num_bits", 8))
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise UnsupportedQuantisation(f"compressed-tensors with weights {kind:.10}{bits}")
    groups = {each.get("group_size") for each in weights}
    return Quantisation(
        "compressed-tensors",
        group=int(groups.pop() or -1) if len(groups) == 1 else None,
        block=next(_blocks(each.get("block_structure") for each in weights), None),
        bits=tuple({int(each.get("num_bits", 8)) for each in weights}),
        has_order=any(each.get("actorder") in ("group", "dynamic") for each in weights),
    )


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    if (kind := str(config.get("fmt") or "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedQuantisation(f"FP8 as {kind:.40}")
    block = next(_blocks([config.get("weight_block_size")]), None)
    return Quantisation("fp8", block=block)


def _modelopt(config: Mapping[str, Any]) -> Quantisation:
    inner = config.get("quantization") or config
    if (kind := str(inner.get("quant_algo"))) != "FP8":
        raise UnsupportedQuantisation(f"ModelOpt as {kind:.40}")
    return Quantisation("fp8")


def _blocks(sizes: Any) -> Iterator[tuple[int, int]]:
    """Yield the sizes that are not None: pairs of numbers, or such as "128x128"."""
    for size in sizes:
        if size is not None:
            rows, columns = size.split("x") if isinstance(size, str) else size
            yield int(rows), int(columns)


_PARSERS = {
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
}
