"""Models that suit long documents: what `models.json` says of them.

Their files are not here: sizes follow from the fields of their config.json, and from the mixture of
types that llama.cpp's quantisation gives a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import single_branches
from parallel.config.weight_sizes import matrix_columns
from parallel.formats.locate import PACKAGED
from parallel.formats.plane_format import PLANE_FORMATS, KeptType
from parallel.formats.weight_headers import EMBEDDING, HEAD

WHOLE = "16 bits"
_BLOCK = 256  # weights of a block of Q4_K, Q5_K and Q6_K; matrices with other columns have others
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class ModelFile:
    """A model in a format, as `--model` names it."""

    format: str  # 16 bits, Q4_K_M, Q4_1 or MXFP4
    name: str  # on the hub, or of a package
    is_gated: bool = False  # the hub asks for an account that has accepted the licence

    @property
    def repository(self) -> str:
        """Return the name on the hub without that of the format."""
        return self.name.partition(":")[0]

    @property
    def command(self) -> str:
        """Return the command that fetches the files."""
        if self.name in PACKAGED:
            return PACKAGED[self.name][1]
        repo, _, tag = self.name.partition(":")
        if tag:  # Unsloth has files of other mixtures, whose tags end likewise
            return f"hf download {repo} --include '*{tag}.gguf' --exclude '*-UD-*'"
        return f"hf download {repo} --exclude '*/*'"  # folders hold other formats

    @property
    def licence_page(self) -> str | None:
        """Return where the licence has to be accepted, if it has to be."""
        return f"https://huggingface.co/{self.repository}" if self.is_gated else None


@dataclass(frozen=True)
class CatalogueModel:
    """A model, and where its files are."""

    name: str  # in the catalogue
    title: str
    licence: str
    config: ModelConfig  # in 16 bits
    files: tuple[ModelFile, ...]
    draft: CatalogueModel | None  # recommended; it has the same tokenizer

    def in_format(self, file: ModelFile) -> ModelConfig:
        """Return the config of the model as it is in a file, with what can stay packed.

        GGUF files are taken as having no prediction block, which many leave out.
        """
        if file.format == WHOLE:
            return self.config
        config = replace(self.config, has_predictor=False)
        types = _mixture(config, matrix_columns(config), file.format)
        return replace(config, kept_types=tuple(types.items()))

    def draft_file(self, file: ModelFile) -> ModelFile | None:
        """Return the draft's file that goes with a file: the smallest, or 16 bits beside these."""
        if self.draft is None:
            return None
        return self.draft.files[0 if file.format == WHOLE else -1]


def load_catalogue() -> tuple[list[CatalogueModel], list[CatalogueModel]]:
    """Return the targets, from small to large, and their drafts."""
    content = _content()
    drafts = {entry["draft"] for entry in content.values() if "draft" in entry}
    targets = [_model(name) for name in content if name not in drafts]
    return targets, [_model(name) for name in content if name in drafts]


def find_model(name: str) -> CatalogueModel:
    """Return a model by its name in the catalogue, by its title, or by a file's name on the hub.

    Raises TierForceError for an unknown one.
    """
    wanted = name.casefold()
    for model in map(_model, _content()):
        names = [model.name, model.title]
        names += [each for file in model.files for each in (file.name, file.repository)]
        if wanted in map(str.casefold, names):
            return model
    raise TierForceError(
        f'the list has no model "{name}": it has {", ".join(_content())}. Other models run, too: '
        "`tierforce plan --model NAME` says how."
    )


@cache
def _content() -> dict[str, Any]:
    return dict(json.loads(files("decoding.app.hardware").joinpath("models.json").read_text()))


@cache
def _model(name: str) -> CatalogueModel:
    entry = _content()[name]
    return CatalogueModel(
        name,
        entry["title"],
        entry["licence"],
        ModelConfig.from_fields({"dtype": "bfloat16", **entry["config"]}),
        tuple(ModelFile(**file) for file in entry["files"]),
        _model(entry["draft"]) if "draft" in entry else None,
    )


def _mixture(config: ModelConfig, columns: Mapping[str, int], format: str) -> dict[str, KeptType]:
    """Return the types of matrices; those that are stored in 16 bits are left out."""
    types: dict[str, KeptType] = {}
    for name, count in columns.items():
        if format == "MXFP4":  # as published: experts alone
            kind = "MXFP4" if "{}" in name else None
        elif format == "Q4_K_M":
            kind = _type_in_q4_k_m(config, name)
        else:
            kind = "Q6_K" if name == EMBEDDING and config.tied else format
        if kind is not None:
            kind = _SMALLER_BLOCKS.get(kind, kind) if count % _BLOCK else kind
            types[name] = PLANE_FORMATS[kind]
    return types


def _type_in_q4_k_m(config: ModelConfig, name: str) -> str:
    """Return the type that llama.cpp's quantisation gives a matrix in Q4_K_M.

    Half of the layers have values and outputs of MLPs in Q6_K (`use_more_bits` of llama-quant.cpp).
    Values of a 70B, which it stores in Q5_K, are taken as those of others: 0.1% of the bytes.
    """
    if name == HEAD or (name == EMBEDDING and config.tied):
        return "Q6_K"
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        return "Q8_0"
    if name.endswith("linear_attn.out_proj.weight"):
        return "Q5_K"
    match = re.search(r"layers\.(\d+)\..*(v_proj|down_proj)\.weight$", name)
    if match is None:
        return "Q4_K"
    layers = config.layers
    if config.split_layers is not None:  # mixers and MLPs are layers of their own
        layers += config.layers - single_branches(config)
    layer, eighth = int(match[1]), layers // 8
    is_outer = layer < eighth or layer >= 7 * eighth
    return "Q6_K" if is_outer or (layer - eighth) % 3 == 2 else "Q4_K"
