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
from parallel.formats.group_headers import group_headers
from parallel.formats.hub import fetch_headers
from parallel.formats.plane_format import KeptType
from parallel.formats.quantisation import (
    FIELD,
    Quantisation,
    UnsupportedQuantisation,
    quantisation_fields,
)
from parallel.formats.weight_headers import (
    TensorHeader,
    has_own_head,
    stored_tensors,
    weight_files,
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
    """Return the fields of a config.json, corrected by the files beside it.

    Raises ConfigError if it does not describe a model, and CheckpointError if the weights beside it
    are broken.
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
    if path.name == "config.json":
        fields[FIELD] = _quantisation_fields(path.parent, fields)
        if (family := FAMILIES.get(kind)) is not None:
            tied = bool_field(fields, "tie_word_embeddings", family.tied)
            fields["tie_word_embeddings"] = _is_tied(path.parent, tied)
    return fields


def _quantisation_fields(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `quantization_config` of the weights in a folder, which belong to it.

    Raises ConfigError and CheckpointError.
    """
    try:
        config = quantisation_fields(fields, folder)
        quantisation = Quantisation.parse(config) if config else None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: the config of its quantised weights cannot be read ({one_line(error)}): "
            "fetch it again."
        ) from error
    except UnsupportedQuantisation:  # named with all that is not supported
        return config
    group_headers(stored_tensors(folder), quantisation)
    return config


def quantised_types(
    path: Path, fields: Mapping[str, Any], hub_name: str | None = None
) -> dict[str, KeptType]:
    """Return how quantised matrices of a safetensors model can stay packed, by name.

    Args:
        path: of its config.json.
        fields: those of `read_fields`, of a model that is supported.
        hub_name: of the repository in which the weights are, if they are not beside it.

    Raises CheckpointError if the weights are quantised, and are broken or cannot be found.
    """
    config = fields.get(FIELD)
    if not config:
        return {}
    tensors: Mapping[str, TensorHeader] = stored_tensors(path.parent)
    if not tensors and hub_name is not None:
        tensors = fetch_headers(hub_name)
    if not tensors:
        weight_files(path.parent)
        raise CheckpointError(
            f"{path.parent}: the weights are quantised, and their files are incomplete. Was the "
            "download interrupted? Fetch them again."
        )
    matrices, _ = group_headers(tensors, Quantisation.parse(config))
    planes = {name: matrix.planes for name, matrix in matrices.items()}
    return {name: each for name, each in planes.items() if each is not None}


def fields_for_transformers(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a copy of a config.json's fields that transformers interprets as this package does.

    transformers fails on dtypes that torch does not know, and on empty fields whose value is not
    null.
    """
    hf_fields = with_known_rope(fields, family)
    for name in ("dtype", "torch_dtype", FIELD):
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
    weights that cannot be compared.
    """
    tensors = stored_tensors(folder)
    try:
        return tied and not has_own_head(tensors)
    except OSError as error:
        raise CheckpointError(f"{folder}: its weights cannot be read: {error.strerror}.") from error
