"""Headers of safetensors files: types, shapes and offsets of the tensors, read without torch."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import TypeVar

from offload.regular_files import MIB, read_json
from parallel.errors import CheckpointError
from parallel.formats.tensor_names import own_name

# supported dtypes of weights, in which models also run: name in safetensors, name in torch
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}
_MAX_HEADER = 32 * MIB  # maximum bytes of a header; real ones have a few MB
_COMPARE_BYTES = 16 * MIB  # bytes per step of a comparison of two tensors
WORDS = ("qweight", "weight_packed")  # in place of `weight`, if codes are packed in words
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PREDICTION = "mtp."  # prefix of a multi-token-prediction block
PREDICTOR_INPUT = f"{PREDICTION}pre_fc_norm_hidden.weight"  # all such blocks have it
# parts of such a block that is supported, and those that others have
_PREDICTION_PARTS = {
    f"{PREDICTION}{part}"
    for part in (
        "fc",
        "norm",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
        *(f"layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"layers.0.self_attn.{name}_norm" for name in "qk"),
    )
}
_MLP_PARTS = ("mlp.gate_proj", "mlp.gate")  # one that a dense MLP has, and one of a mixture
_OTHER_PREDICTION_PARTS = ("layers.1.", "embed_tokens.", "lm_head.")
_TEXT_PREFIXES = {  # those of a text model in a larger one: its own
    "language_model.model.": "model.",
    "model.language_model.mtp.": PREDICTION,
    "model.language_model.": "model.",
    "model.mtp.": PREDICTION,
    "language_model.lm_head.": "lm_head.",
    # Nemotron-H's
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}
_VISION = (  # prefixes of the parts for images in a larger model
    "vision_tower.",
    "visual.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.visual.",
    "model.multi_modal_projector.",
)
_UNUSED = ("model.mtp_",)  # blocks of MiMo and ERNIE 4.5 that predict further tokens


Header = TypeVar("Header")


class _Incomplete(Exception):
    """The file is not a complete safetensors file."""


@dataclass(frozen=True)
class TensorHeader:
    """What a file says about a tensor."""

    path: Path
    name: str
    dtype: str  # safetensors'
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor(TensorHeader):
    """The location of a tensor in a file."""

    start: int  # offset in the file in bytes
    nbytes: int


def is_vision(name: str) -> bool:
    """Return whether a tensor belongs to a larger model's part for images."""
    return name.startswith(_VISION)


def text_tensor(name: str) -> str | None:
    """Return the name of a tensor in the text model alone; None for one of another part."""
    if name.startswith((*_VISION, *_UNUSED)):
        return None
    for prefix, own in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return own_name(name)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files, keyed by name in the text model.

    The result is empty if files are missing or incomplete: a plan needs no weights, and loading
    reports what is wrong with them.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        for path in weight_files(folder):
            tensors |= _header(path)
    except (CheckpointError, OSError, _Incomplete):
        return {}
    return without_unsupported_predictor(tensors)


def has_own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the files hold an output head that is not a copy of the embedding.

    Raises OSError if they cannot be read.
    """
    if HEAD not in tensors:  # unless it is quantised
        return bool({f"{HEAD.removesuffix('weight')}{codes}" for codes in WORDS} & tensors.keys())
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    return embedding is None or not _equal(head, embedding)


def without_unsupported_predictor(tensors: dict[str, Header]) -> dict[str, Header]:
    """Return tensors without those of a multi-token-prediction block that is not supported.

    One that is has one layer, and its model's embedding and head.
    """
    parts = {name.rpartition(".")[0] for name in tensors}
    others = tuple(PREDICTION + part for part in _OTHER_PREDICTION_PARTS)
    has_mlp = any(f"{PREDICTION}layers.0.{part}" in parts for part in _MLP_PARTS)
    has_others = any(name.startswith(others) for name in tensors)
    if parts >= _PREDICTION_PARTS and has_mlp and not has_others:
        return tensors
    return {name: each for name, each in tensors.items() if not name.startswith(PREDICTION)}


def has_predictor(names: Container[str]) -> bool:
    """Return whether tensors of these names include a multi-token-prediction block."""
    return PREDICTOR_INPUT in names


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder's weights. Raises CheckpointError without any."""
    index_path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index_path.is_file():
        files = _indexed(folder, index_path)
        if single.is_file() and single not in files:
            raise CheckpointError(
                f"{folder} has {single.name}, but {index_path.name} names other files. Remove the "
                "one that does not belong to the model, or fetch the model again."
            )
        return files
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise CheckpointError(
            f"{folder} has only pickle weights, which can run code and are not loaded."
            ' Convert them once: python -c "from transformers import AutoModelForCausalLM as'
            f" M; M.from_pretrained('{folder}', "
            f"dtype='auto').save_pretrained('{folder}')\""
        )
    if (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(
            f"{folder} holds only the weights of an adapter (LoRA): merge it into its model once, "
            "with PEFT's merge_and_unload, and save the whole."
        )
    raise CheckpointError(f"{folder} has no weights: model.safetensors (or its index) is missing.")


def _indexed(folder: Path, index_path: Path) -> list[Path]:
    """Return the files listed in an index. Raises CheckpointError if it is invalid."""
    try:
        names = set(read_json(index_path, 64 * MIB)["weight_map"].values())
        files = sorted(folder / name for name in names)
        outside = sorted(
            name for name in names if Path(name).is_absolute() or ".." in Path(name).parts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index_path} is not a readable weight index: {error}. Fetch it again."
        ) from error
    if outside:
        raise CheckpointError(
            f"{index_path} names {outside[0]}, which lies outside its folder: fetch it again."
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} weight files are missing, first {missing[0]}. "
            "Fetch them again."
        )
    return files


def _header(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors. Raises _Incomplete, and OSError if it cannot be read."""
    size, tensors = path.stat().st_size, {}
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            raise _Incomplete
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = (index(offset) for offset in entry["data_offsets"])
                shape = tuple(index(size) for size in entry["shape"])
                if not isinstance(entry["dtype"], str) or min(shape, default=0) < 0:
                    raise _Incomplete
                tensor = StoredTensor(
                    path,
                    name,
                    entry["dtype"],
                    shape,
                    8 + length + first,
                    last - first,
                )
                itemsize = ITEM_BYTES.get(tensor.dtype)
                if not 0 <= first <= last <= size - 8 - length or (
                    itemsize is not None and prod(shape) * itemsize != last - first
                ):
                    raise _Incomplete
                if (text_name := text_tensor(name)) is None:
                    continue
                if text_name in tensors:
                    raise _Incomplete
                tensors[text_name] = tensor
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _Incomplete from error
    return tensors


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors have the same content."""
    if (first.dtype, first.shape, first.nbytes) != (second.dtype, second.shape, second.nbytes):
        return False
    with first.path.open("rb") as left, second.path.open("rb") as right:
        left.seek(first.start)
        right.seek(second.start)
        remaining = first.nbytes
        while remaining:
            count = min(remaining, _COMPARE_BYTES)
            part = left.read(count)
            if len(part) < count or part != right.read(count):
                return False
            remaining -= count
    return True


def check_floats(tensors: Iterable[TensorHeader]) -> None:
    """Raise CheckpointError if a tensor of weights that are not quantised is of another type."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; only {', '.join(DTYPES)} "
                "weights are supported, and no file beside it says how they are quantised. Fetch "
                "the model with all of its .json files, or use its 16-bit checkpoint."
            )
