"""Reading a model's config.json, and what lies beside it that says more of the model.

Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import one_line
from offload.regular_files import read_json
from parallel.config.families import FAMILIES, Family, missing_fields
from parallel.config.rope import with_known_rope
from parallel.config_checks import flag
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.weight_headers import (
    DTYPES,
    QUANTISED_BY,
    has_own_head,
    stored_tensors,
    unread_dtype,
)


def config_file(folder: Path) -> Path:
    """Return the config.json of a folder. Raises ConfigError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{folder} holds an adapter (LoRA) without the model it was made for: merge it "
                "into that model once, with PEFT's merge_and_unload, and save the whole."
            )
        raise ConfigError(
            f"{folder} has no config.json: point `model` and `draft` at complete Hugging Face "
            "checkpoint folders, or at GGUF files."
        )
    return path


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json, corrected by the weights beside it.

    Raises ConfigError where it does not say what the model is, and CheckpointError for weights
    beside it that are compressed.
    """
    try:
        given = read_json(path)
        if not isinstance(given, dict):
            raise ValueError("it is not a JSON object")
        if not isinstance(kind := given.get("model_type", ""), str):
            raise ValueError(f"its model_type is {str(kind)[:60]}, which is no name")
    except Exception as error:  # no file, no text, no JSON, no object
        raise ConfigError(
            f"{path} cannot be read as a model's config ({one_line(error)}): fetch it again."
        ) from error
    if missing := missing_fields(given):
        raise ConfigError(f"{path} lacks {', '.join(missing)}: it does not say what the model is.")
    family = FAMILIES.get(kind)
    if family is not None and path.name == "config.json":
        tied = flag(given, "tie_word_embeddings", family.tied)
        given["tie_word_embeddings"] = _is_tied(path.parent, tied)
    return given


def fields_for_transformers(given: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a copy of a config.json's fields that transformers reads as they are read here.

    It trips over number formats that torch does not know, and where a field says nothing by
    another value than null.
    """
    fields = with_known_rope(given, family)
    for name in ("dtype", "torch_dtype"):
        fields.pop(name, None)
    for name in ("layer_types", "no_rope_layers"):
        if not fields.get(name):
            fields.pop(name, None)
    if fields.get("sliding_window") is False:
        fields["sliding_window"] = None
    return fields


def _is_tied(folder: Path, tied: bool) -> bool:
    """Return whether a model's head is its embedding, which its config says or denies.

    Where the files hold a head of its own it is not, as in transformers. Raises CheckpointError for
    weights that are compressed or cannot be compared.
    """
    tensors = stored_tensors(folder)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise unread_dtype(tensor.path, name, tensor.dtype)
    quantised = next((folder / name for name in QUANTISED_BY if (folder / name).is_file()), None)
    if quantised is not None and not tensors:
        raise CheckpointError(
            f"{quantised} says that the weights are compressed, which is not supported: use the "
            "model's 16-bit checkpoint."
        )
    try:
        return tied and not has_own_head(tensors)
    except OSError as error:
        raise CheckpointError(f"{folder}: its weights cannot be read: {error.strerror}.") from error
