"""Reading a model's config.json, together with the files beside it that affect its meaning.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import one_line
from offload.regular_files import read_json
from parallel.config.families import FAMILIES, Family, expert_count, missing_fields
from parallel.config.recurrent import recurrent_shape
from parallel.config.rope import with_known_rope
from parallel.config.text_model import TIED, WRAPPER, text_fields
from parallel.config.windows import layer_types
from parallel.config_checks import FULL, PREDICTORS, bool_field
from parallel.config_layers import without_rope
from parallel.errors import CheckpointError, ConfigError
from parallel.formats.expert_headers import ExpertHeader, expert_headers
from parallel.formats.group_headers import GroupHeader, group_headers
from parallel.formats.hub import fetch_headers
from parallel.formats.plane_format import KeptType, PlaneFormat
from parallel.formats.quantisation import (
    FIELD,
    Quantisation,
    UnsupportedQuantisation,
    quantisation_fields,
)
from parallel.formats.weight_headers import (
    StoredTensor,
    TensorHeader,
    check_floats,
    has_own_head,
    has_predictor,
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


QuantisedHeader = GroupHeader | ExpertHeader


class ConfigFile(NamedTuple):
    """A model's config.json, with what the files beside it add."""

    path: Path
    fields: dict[str, Any]
    has_weights: bool  # beside it, as safetensors
    matrices: Mapping[str, QuantisedHeader]  # those of them that are quantised, by name

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a config.json, corrected by the files beside it.

        Raises ConfigError if it does not describe a model, and CheckpointError if the weights
        beside it are broken.
        """
        fields = _read_fields(path)
        if path.name != "config.json":
            return cls(path, fields, False, {})
        tensors = stored_tensors(path.parent)
        matrices: Mapping[str, QuantisedHeader] = {}
        try:
            fields[FIELD] = quantisation_fields(fields, path.parent, tensors)
            matrices = _quantised_matrices(tensors, fields[FIELD])
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path.parent}: the config of its quantised weights cannot be read "
                f"({one_line(error)}): fetch it again."
            ) from error
        except UnsupportedQuantisation:
            pass  # named with all that is not supported
        if (family := FAMILIES.get(fields.get("model_type", ""))) is not None:
            # a larger model's config may leave it to the files
            default = family.tied or (bool(tensors) and WRAPPER in fields)
            tied = bool_field(fields, TIED, default)
            fields[TIED] = _is_tied(path.parent, tensors, tied)
        if tensors:
            fields[PREDICTORS] = int(has_predictor(tensors))
        return cls(path, fields, bool(tensors), matrices)

    def with_headers(self, hub_name: str | None = None) -> ConfigFile:
        """Return the file with what the headers of quantised weights say.

        `hub_name`: the repository in which the weights are, if they are not beside the config.
        Raises CheckpointError if the weights are quantised and cannot be found.
        """
        config = self.fields.get(FIELD)
        if not config or self.has_weights:
            return self
        tensors = {} if hub_name is None else fetch_headers(hub_name)
        matrices = _quantised_matrices(tensors, config)
        if not tensors:
            weight_files(self.path.parent)
            raise CheckpointError(
                f"{self.path.parent}: the weights are quantised, and their files are "
                "incomplete. Was the download interrupted? Fetch them again."
            )
        fields = {**self.fields, PREDICTORS: int(has_predictor(tensors))}
        return self._replace(fields=fields, matrices=matrices)

    def kept_types(self) -> dict[str, KeptType]:
        """Return how quantised matrices of a supported model can stay packed, by name.

        A name with {} stands for those of all experts, if they are alike.
        """
        planes = {name: matrix.planes for name, matrix in self.matrices.items()}
        types = {name: each for name, each in planes.items() if each is not None}
        return _by_stack(types, expert_count(self.fields))


def _quantised_matrices(
    tensors: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> dict[str, QuantisedHeader]:
    """Return the quantised matrices among tensors, of which `config` says how they are stored.

    Raises UnsupportedQuantisation, and CheckpointError for tensors that do not belong together.
    """
    experts, stacks = expert_headers(tensors)
    others = {name: each for name, each in tensors.items() if name not in stacks}
    matrices: dict[str, QuantisedHeader] = {
        name: each for name, each in experts.items() if each.scale is not None
    }
    if config:
        matrices |= group_headers(others, Quantisation.parse(config))[0]
    else:
        check_floats(others.values())
    return matrices


def _by_stack(types: Mapping[str, KeptType], experts: Any) -> dict[str, KeptType]:
    """Return types with one name, with {}, for the matrices of all experts that are alike.

    Those of others, and in an order of their own, are left out: they do not stay packed.
    """
    stacks: dict[str, list[KeptType]] = {}
    for name, kind in types.items():
        stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.{}.", name), []).append(kind)
    return {
        name: kinds[0]
        for name, kinds in stacks.items()
        if "{}" not in name or (len(set(kinds)) == 1 and len(kinds) == experts and _is_plain(kinds))
    }


def _is_plain(kinds: Sequence[KeptType]) -> bool:
    """Return whether experts of these types stay packed: in planes, with columns in order."""
    return all(isinstance(kind, PlaneFormat) and not kind.order for kind in kinds)


def _read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json. Raises ConfigError if it does not describe a model."""
    try:
        fields = read_json(path)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        fields = text_fields(fields)
        if not isinstance(kind := fields.get("model_type", ""), str):
            raise ValueError(f"its model_type is {str(kind)[:60]}, which is not a name")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # not a file, not text, not JSON, or not an object
        raise ConfigError(
            f"{path} cannot be read as a model's config ({one_line(error)}): fetch it again."
        ) from error
    if missing := missing_fields(fields):
        raise ConfigError(f"{path} lacks {', '.join(missing)}: it does not say what the model is.")
    return fields


def fields_for_transformers(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a copy of a config.json's fields that transformers interprets as this package does.

    transformers fails on dtypes that torch does not know, and on empty fields whose value is not
    null.
    """
    hf_fields = with_known_rope(fields, family)
    for name in ("dtype", "torch_dtype", FIELD, WRAPPER):
        hf_fields.pop(name, None)
    for name in ("layer_types", "no_rope_layers"):
        if not hf_fields.get(name):
            hf_fields.pop(name, None)
    if family.has_latents:  # transformers takes it for qk_rope_head_dim
        hf_fields.pop("head_dim", None)
    if family.has_mamba:
        hf_fields = _with_known_mamba(hf_fields, fields, family)
    if hf_fields.get("model_type") == "exaone4" and "layer_types" not in hf_fields:
        # transformers fails on patterns of letters, and without windows it divides by zero
        has_window = fields.get("sliding_window", family.sliding_window)
        kinds = layer_types(fields, family) if has_window else [FULL] * fields["num_hidden_layers"]
        hf_fields["layer_types"] = kinds
    for name in ("swiglu_alpha", "swiglu_limit"):  # transformers fails on whole numbers
        if type(hf_fields.get(name)) is int:
            hf_fields[name] = float(hf_fields[name])
    if hf_fields.get("sliding_window") is False:
        hf_fields["sliding_window"] = None
    return hf_fields


def _with_known_mamba(
    hf_fields: Mapping[str, Any], fields: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """Return a copy of fields without those that have no effect, but that transformers may reject.

    They are limits of step sizes, Nemotron-H's RoPE, and sizes of recurrent layers without any.
    """
    known = {name: value for name, value in hf_fields.items() if name != "time_step_limit"}
    if family.has_split_layers:
        return without_rope(known)
    if recurrent_shape(fields, family) is not None:
        return known
    sizes = [name for name in known if name.startswith("mamba_")]
    return {name: known[name] for name in known if name not in sizes} | {"mamba_n_heads": 1}


def _is_tied(folder: Path, tensors: Mapping[str, StoredTensor], tied: bool) -> bool:
    """Return whether the output head is tied to the embedding; `tied` is what the config says.

    As in transformers, it is not if the files hold a head of its own. Raises CheckpointError for
    weights that cannot be compared.
    """
    try:
        return tied and not has_own_head(tensors)
    except OSError as error:
        raise CheckpointError(f"{folder}: its weights cannot be read: {error.strerror}.") from error
