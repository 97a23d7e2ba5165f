"""What safetensors files say of their tensors: types, shapes and places, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path

from offload.regular_files import MIB, read_json
from parallel.errors import CheckpointError

# that are read, and in which models are run, with their names in torch
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# files that say that a folder's weights are compressed where its config.json does not: NVIDIA's
# (FP8, NVFP4), and those of GPTQ and AWQ before transformers knew them
QUANTISED_BY = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_MAX_HEADER = 32 * MIB  # bytes; of real files it is a few MB
_AT_ONCE = 16 * MIB  # bytes of two tensors that are compared
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class _Incomplete(Exception):
    """A file that is no whole safetensors file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    nbytes: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's safetensors files, by name.

    There are none where files are missing or not complete: a plan needs no weights, and loading
    says what is wrong with them.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        for path in weight_files(folder):
            tensors |= _header(path)
    except (CheckpointError, OSError, _Incomplete):
        return {}
    return tensors


def has_own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the files hold a head that is not a copy of the embedding.

    Raises OSError where they cannot be read.
    """
    if HEAD not in tensors:
        return False
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    return embedding is None or not _equal(head, embedding)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold a folder's weights. Raises CheckpointError."""
    listed, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if listed.is_file():
        files = _indexed(folder, listed)
        if single.is_file() and single not in files:
            raise CheckpointError(
                f"{folder} has {single.name}, and {listed.name} names other files: only one of the "
                "two can be meant. Remove the one that is not, or fetch the model again."
            )
        return files
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise CheckpointError(
            f"{folder} has pickle weights only, which can run code and are not loaded."
            ' Convert them once: python -c "from transformers import AutoModelForCausalLM as'
            f" M; M.from_pretrained('{folder}', "
            f"dtype='auto').save_pretrained('{folder}')\""
        )
    if (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(
            f"{folder} holds the weights of an adapter (LoRA) alone: merge it into its model once, "
            "with PEFT's merge_and_unload, and save the whole."
        )
    raise CheckpointError(f"{folder} has no weights: model.safetensors (or its index) is missing.")


def _indexed(folder: Path, listed: Path) -> list[Path]:
    """Return the files that an index names. Raises CheckpointError."""
    try:
        names = set(read_json(listed, 64 * MIB)["weight_map"].values())
        files = sorted(folder / name for name in names)
        outside = sorted(
            name for name in names if Path(name).is_absolute() or ".." in Path(name).parts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{listed} is not a readable weight index: {error}. Fetch it again."
        ) from error
    if outside:
        raise CheckpointError(
            f"{listed} names {outside[0]}, which lies outside its folder: fetch it again."
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} weight files are missing, first {missing[0]}. "
            "Fetch them again."
        )
    return files


def _header(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors. Raises _Incomplete, and OSError where it cannot be read."""
    size, tensors = path.stat().st_size, {}
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            raise _Incomplete
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, said in header.items():
                first, last = (index(offset) for offset in said["data_offsets"])
                place = StoredTensor(
                    path, said["dtype"], tuple(said["shape"]), 8 + length + first, last - first
                )
                if not 0 <= first <= last <= size - 8 - length:
                    raise _Incomplete
                tensors[name] = place
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _Incomplete from error
    return tensors


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have the same content."""
    if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
        return False
    with one.path.open("rb") as left, other.path.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        remaining = one.nbytes
        while remaining:
            count = min(remaining, _AT_ONCE)
            part = left.read(count)
            if len(part) < count or part != right.read(count):
                return False
            remaining -= count
    return True


def dtype_error(path: Path, name: str, dtype: str) -> CheckpointError:
    """Return the error for a tensor of a safetensors file whose dtype is not read."""
    found = [each for each in QUANTISED_BY if (path.parent / each).is_file()]
    why = f", as {found[0]} beside it says" if found else ""
    return CheckpointError(
        f"{path}: tensor {name} is {dtype}; only {', '.join(DTYPES)} weights are read. If it "
        f"holds compressed weights{why}, use the model's 16-bit checkpoint."
    )
