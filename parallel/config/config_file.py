"""Reading a model's config.json, together with the files beside it that affect its meaning.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import one_line
from offload.regular_files import read_json
from parallel.config.families import FAMILIES, Family, missing_fields
from parallel.config.rope import with_known_rope
from parallel.config_checks import bool_field
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.weight_headers import (
    DTYPES,
    QUANTISED_BY,
    dtype_error,
    has_own_head,
    stored_tensors,
)


def config_file(folder: Path) -> Path:
    """Return the path of a folder's config.json. Raises ConfigError if there is none."""
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

    Raises ConfigError if it does not describe a model, and CheckpointError if the weights beside it
    are quantised.
    """
    try:
        fields = read_json(path)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        if not isinstance(kind := fields.get("model_type", ""), str):
            raise ValueError(f"its model_type is {str(kind)[:60]}, which is not a name")
    except Exception as error:  # not a file, not text, not JSON, or not an object
        raise ConfigError(
            f"{path} cannot be read as a model's config ({one_line(error)}): fetch it again."
        ) from error
    if missing := missing_fields(fields):
        raise ConfigError(f"{path} lacks {', '.join(missing)}: it does not say what the model is.")
    family = FAMILIES.get(kind)
    if family is not None and path.name == "config.json":
        tied = bool_field(fields, "tie_word_embeddings", family.tied)
        fields["tie_word_embeddings"] = _is_tied(path.parent, tied)
    return fields


def fields_for_transformers(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a copy of a config.json's fields that transformers interprets as this package does.

    transformers fails on dtypes that torch does not know, and on empty fields whose value is not
    null.
    """
    hf_fields = with_known_rope(fields, family)
    for name in ("dtype", "torch_dtype"):
        hf_fields.pop(name, None)
    for name in ("layer_types", "no_rope_layers"):
        if not hf_fields.get(name):
            hf_fields.pop(name, None)
    if hf_fields.get("sliding_window") is False:
        hf_fields["sliding_window"] = None
    return hf_fields


def _is_tied(folder: Path, tied: bool) -> bool:
    """Return whether the output head is tied to the embedding; `tied` is what the config says.

    As in transformers, it is not if the files hold a head of its own. Raises CheckpointError for
    weights that are quantised or cannot be compared.
    """
    tensors = stored_tensors(folder)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise dtype_error(tensor.path, name, tensor.dtype)
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
