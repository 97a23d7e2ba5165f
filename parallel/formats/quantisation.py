"""What a checkpoint's files say about how its weights are quantised.

Does not import torch, since a plan has to be fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.regular_files import read_json
from parallel.formats.weight_headers import DTYPES, TensorHeader, stored_tensors

FIELD = "quantization_config"  # in config.json
QUANTISATION_FIELDS = (FIELD, "quantization", "compression_config")  # all that may say it there
# Files beside it that say how weights are quantised: NVIDIA's (FP8, NVFP4), and those of GPTQ and
# AWQ before transformers supported them.
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
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}
_ROTATIONS = ("rotation", "rotation_config", "spinquant_config")
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PER_GROUP = ("mixed-precision", "dense")  # the formats are those of the groups of layers


class UnsupportedQuantisation(Exception):
    """Weights are quantised in a way that is not supported; the message says which."""


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are quantised, for whatever its tensors do not tell."""

    method: str  # awq, gptq, compressed-tensors, fp8 or mxfp4
    # bits, and columns that share a scale (-1: all of a row), of matrices in words of 32 bits
    sizes: frozenset[tuple[int, int]] = frozenset()
    block: tuple[int, int] | None = None  # rows and columns that share a scale, of those in bytes
    has_order: bool = False  # columns of a group may lie anywhere in a row (act-order)
    is_zero_less_one: bool = False  # zero points are stored less 1

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Quantisation:
        """Return what a `quantization_config` says. Raises UnsupportedQuantisation."""
        method = " ".join(str(config.get("quant_method") or "an unknown method").lower().split())
        parse = _PARSERS.get(method)
        if parse is None:
            raise UnsupportedQuantisation(_NAMES.get(method, method[:40]))
        if any(config.get(field) for field in _ROTATIONS):
            raise UnsupportedQuantisation(f"{method} with rotations")
        try:
            return parse(config)
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedQuantisation(f"{method} with an unreadable config") from error


def quantisation_fields(
    fields: Mapping[str, Any],
    folder: Path | None = None,
    tensors: Mapping[str, TensorHeader] | None = None,
) -> dict[str, Any]:
    """Return a model's `quantization_config`; empty if its weights are not quantised.

    Args:
        fields: those of its config.json.
        folder: in which other files may say it, if any. They do not count if all weights there
            are floats.
        tensors: those in the folder, if the caller has already read their headers.

    Raises OSError and ValueError if such a file cannot be read.
    """
    config = fields.get(FIELD)
    is_named = isinstance(config, Mapping) and bool(config.get("quant_method"))
    if isinstance(fields.get("quantization"), Mapping) and not is_named:
        return {"quant_method": "mlx"}
    if config:
        return dict(config) if isinstance(config, Mapping) else {"quant_method": config}
    if isinstance(config := fields.get("compression_config"), Mapping) and config:
        return {"quant_method": "compressed-tensors", **config}
    files = [] if folder is None else [folder / name for name in FILES]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return {}
    tensors = stored_tensors(path.parent) if tensors is None else tensors
    if tensors and all(tensor.dtype in DTYPES for tensor in tensors.values()):
        return {}
    beside = read_json(path)
    if not isinstance(beside, Mapping):
        raise ValueError(f"{path.name} is not a JSON object")
    return _named(path.name, beside)


def find_quantisation(folder: Path) -> Quantisation | None:
    """Return how the weights of a folder are quantised; None if they are not.

    Raises UnsupportedQuantisation, OSError and ValueError.
    """
    path = folder / "config.json"
    fields = read_json(path) if path.is_file() else {}
    fields = fields if isinstance(fields, Mapping) else {}
    inner = fields.get("text_config")
    if isinstance(inner, Mapping) and not any(map(fields.get, QUANTISATION_FIELDS)):
        fields = inner
    config = quantisation_fields(fields, folder)
    return Quantisation.parse(config) if config else None


def _named(file: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a file of FILES with the name of its method."""
    if file == FILES[0]:
        return {"quant_method": "modelopt", **config}
    is_awq = "w_bit" in config or "q_group_size" in config
    return {"quant_method": "awq" if is_awq else "gptq", **config}


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise UnsupportedQuantisation(f"GPTQ in the format {version:.40}")
    return _words("GPTQ", "gptq", config, version == "gptq")


def _awq(config: Mapping[str, Any]) -> Quantisation:
    version = config.get("version") or config.get("checkpoint_format") or config.get("format")
    version = str(version or "gemm").lower()
    if version != "gemm":
        raise UnsupportedQuantisation(f"AWQ in the format {version:.40}")
    return _words("AWQ", "awq", config, False)


def _auto_round(config: Mapping[str, Any]) -> Quantisation:
    packing = str(config.get("packing_format") or config.get("backend") or "none").lower()
    method = _AUTO_ROUND.get(packing)
    if method is None:
        raise UnsupportedQuantisation(f"AutoRound in the packing format {packing:.40}")
    return _words("AutoRound", method.removesuffix("_v2"), config, method == "gptq")


def _words(
    name: str, method: str, config: Mapping[str, Any], is_zero_less_one: bool
) -> Quantisation:
    """Return the quantisation of a method with codes in words of 32 bits."""
    if str(config.get("pack_dtype") or "int32") != "int32":
        raise UnsupportedQuantisation(f"{name} packed in {config['pack_dtype']!s:.20}")
    default = _number(_first(config, 4, "bits", "w_bit")), _group(config, 128)
    exceptions = [{}, *_exceptions(config)]
    sizes = {
        (_number(each.get("bits", default[0])), _group(each, default[1])) for each in exceptions
    }
    for bits, _ in sorted(sizes):
        if bits < 16 and bits not in ((4,) if method == "awq" else (4, 8)):
            raise UnsupportedQuantisation(f"{name} with {bits} bits")
    return Quantisation(
        method,
        frozenset(sizes),
        has_order=any(each.get("desc_act") is True for each in (config, *exceptions)),
        is_zero_less_one=is_zero_less_one,
    )


def _exceptions(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what GPTQModel (`dynamic`) and AutoRound (`extra_config`) say of single matrices."""
    for field in ("dynamic", "extra_config"):
        for each in (config.get(field) or {}).values():
            yield each or {}


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    if config.get("transform_config"):
        raise UnsupportedQuantisation("compressed-tensors with transforms")
    sparsity = str((config.get("sparsity_config") or {}).get("format", "dense"))
    if sparsity != "dense":
        raise UnsupportedQuantisation(f"compressed-tensors in the format {sparsity:.40}")
    shared = str(config.get("format") or "dense")
    schemes = list((config.get("config_groups") or {}).values())
    formats = {str(scheme.get("format") or shared) for scheme in schemes} | {shared}
    for unknown in sorted(formats - {*_COMPRESSED, *_PER_GROUP}):
        raise UnsupportedQuantisation(f"compressed-tensors in the format {unknown:.40}")
    sizes, blocks, orders = set(), [], set()
    for scheme in schemes:
        weights = scheme.get("weights")
        if not weights:
            continue
        kind, bits = str(weights.get("type", "int")), _number(weights.get("num_bits", 8))
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise UnsupportedQuantisation(f"compressed-tensors with weights {kind:.10}{bits}")
        if kind == "int" and str(scheme.get("format") or shared) not in _COMPRESSED[1:]:
            sizes.add((bits, _group(weights, -1)))
        blocks.append(weights.get("block_structure"))
        orders.add(str(weights.get("actorder")).lower())
    return Quantisation(
        "compressed-tensors",
        frozenset(sizes),
        block=next(_blocks(blocks), None),
        has_order=not orders.isdisjoint({"group", "dynamic", "true"}),
    )


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    if (kind := str(config.get("fmt") or "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedQuantisation(f"FP8 as {kind:.40}")
    if config.get("weight_scale_semantics") == "inverse":  # GPTQModel's: weights are q / s
        raise UnsupportedQuantisation("FP8 with inverse scales")
    return Quantisation("fp8", block=next(_blocks([config.get("weight_block_size")]), None))


def _modelopt(config: Mapping[str, Any]) -> Quantisation:
    inner = config.get("quantization") or config
    if (kind := str(inner.get("quant_algo"))) not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise UnsupportedQuantisation(f"ModelOpt as {kind:.40}")
    return Quantisation("fp8")


def _blocks(sizes: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield the sizes that are not None: pairs of numbers, or such as "128x128"."""
    for size in sizes:
        if size is not None:
            rows, columns = map(_number, size.split("x") if isinstance(size, str) else size)
            yield rows, columns


def _group(config: Mapping[str, Any], default: int) -> int:
    """Return the columns that share a scale, -1 for all of a row."""
    size = _first(config, default, "group_size", "q_group_size")
    return -1 if str(size) == "-1" else _number(size)


def _first(config: Mapping[str, Any], default: int, *names: str) -> Any:
    """Return the first of these fields that is not null."""
    return next((value for name in names if (value := config.get(name)) is not None), default)


def _number(value: Any) -> int:
    """Return a number above 0. Raises ValueError for anything else."""
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int or not 0 < number < 1 << 31:
        raise ValueError(f"{value!r:.40} is not a number above 0")
    return number


_PARSERS = {
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
    "mxfp4": lambda config: Quantisation("mxfp4"),  # its stacks of experts tell the rest
}
