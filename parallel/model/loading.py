"""Model loading, from a name to a model in memory.

Locates the folder or file, builds the model on the meta device, and loads this rank's share.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from accelerate import init_empty_weights
from torch.nn import Parameter

from offload.dtypes import DTYPES, NO_FLOAT16, dtype_of
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig, predictor_config
from parallel.config.parameter_count import min_kv_heads, parameter_count
from parallel.errors import CheckpointError
from parallel.formats import weight_headers
from parallel.formats.checkpoint import Checkpoint, SafetensorsCheckpoint
from parallel.formats.group_checkpoint import GroupCheckpoint
from parallel.formats.hub import GgufName, NotFound, fetch_model
from parallel.formats.locate import find_local, is_gguf
from parallel.formats.quantisation import READABLE, UnsupportedQuantisation, find_quantisation
from parallel.model.prediction import PredictionBlock
from parallel.model.transformer import Transformer
from parallel.ranks.partition import check_ranks
from parallel.ranks.process_group import TensorParallelGroup
from parallel.weights.matrix import Matrix

AnyModel = TypeVar("AnyModel", bound=Transformer)
_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]


def resolve(name: str, group: TensorParallelGroup) -> Path:
    """Return the folder of a model or its GGUF file.

    The name is looked up on this machine, or else rank 0 downloads it from the hub. All ranks call
    it. Raises CheckpointError.
    """
    with group.sync_errors():
        local = find_local(name)
    if local is not None:
        return local
    with group.sync_errors():
        folder = _download(name) if group.rank == 0 else Path()
    return group.broadcast(folder)


def _download(name: str) -> Path:
    """Download a model from the hub and return its folder. Raises CheckpointError."""
    if Path(name).exists():
        raise CheckpointError(
            f"{name} is a file; a model is a folder with config.json, tokenizer and safetensors "
            "weights, or a .gguf file."
        )
    try:
        file = GgufName.parse(name)
        return fetch_model(name, _PATTERNS) if file is None else file.fetch()
    except NotFound as error:
        raise CheckpointError(
            f"{name} is neither a local folder nor a model found on the hub ({error})."
        ) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the weights of a folder or a GGUF file. Raises ConfigError, CheckpointError."""
    if is_gguf(path):
        # Importing gguf takes half a second.
        from parallel.formats.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    try:
        quantisation = find_quantisation(path)
    except (UnsupportedQuantisation, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: its quantised weights are not supported ({error}): use {READABLE}."
        ) from error
    if quantisation is None:
        return SafetensorsCheckpoint(path)
    return GroupCheckpoint(path, quantisation)


def choose_dtype(
    dtype: str, config: ModelConfig, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    """Return the dtype to compute in: `dtype`, or the checkpoint's own if that is `auto`.

    Float16 is very slow on a CPU: there `auto` loads such a checkpoint in float32, which is exact.
    Raises TierForceError for an unknown or unsupported dtype.
    """
    name = config.dtype if dtype == "auto" else dtype
    if dtype == "auto" and name is not None and name not in DTYPES:
        raise TierForceError(
            f"the model's config says dtype {name:.40}, which is not supported: use `dtype` "
            f"{' or '.join(DTYPES)}."
        )
    chosen = checkpoint.dtype if name is None else dtype_of(name)
    if chosen == torch.float16 and device.type == "cpu":
        if dtype != "auto":
            raise TierForceError(NO_FLOAT16)
        return torch.float32
    return chosen


def load_model(
    folder: Path,
    group: TensorParallelGroup,
    dtype: str = "auto",
    config: ModelConfig | None = None,
) -> Transformer:
    """Load this rank's share of a model onto this rank's device.

    Args:
        folder: a complete Hugging Face checkpoint, or a GGUF file.
        group: the ranks that share the model.
        dtype: auto, or a name in DTYPES.
        config: the model's, if the caller has already read it; matrices of its `kept_types` stay
            packed as in their file. By default none do.

    Raises ConfigError, CheckpointError, or TierForceError for the dtype.
    """
    config = config or ModelConfig.from_pretrained(folder)
    check_ranks(min_kv_heads(config), group.size)  # before any tensor is read
    checkpoint = open_checkpoint(folder)
    chosen = choose_dtype(dtype, config, checkpoint, group.device)
    # Checked first: without the embedding, check_sizes may fail with a less clear error.
    checkpoint.check_present(weight_headers.EMBEDDING)
    own = parameter_count(config, group.size, group.rank)
    checkpoint.check_sizes(config.layers, own)  # before torch overflows on implausible sizes
    model = _loaded(Transformer, config, group, checkpoint, chosen)
    model.reserve_scratch()
    return model


def load_predictor(folder: Path, target: Transformer) -> PredictionBlock:
    """Load this rank's share of a target's multi-token-prediction block.

    Raises CheckpointError.
    """
    config, checkpoint = predictor_config(target.config), open_checkpoint(folder)
    block = _loaded(PredictionBlock, config, target.group, checkpoint, target.embed.weight.dtype)
    block.share(target)
    block.reserve_scratch()
    return block


def _loaded(
    kind: type[AnyModel],
    config: ModelConfig,
    group: TensorParallelGroup,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> AnyModel:
    """Return a model with the weights of a checkpoint. Raises CheckpointError."""
    checkpoint.set_dtype(dtype)
    if config.kept_types:
        checkpoint.keep_blocks()
    model = _empty_model(kind, config, group, dtype)
    with torch.no_grad():
        model.load(checkpoint)
    return model.eval()


def random_model(
    config: ModelConfig, group: TensorParallelGroup, dtype: torch.dtype
) -> Transformer:
    """Return a model of these dimensions with random weights, as costly to run as a real one."""
    model = _empty_model(Transformer, config, group, dtype)
    for module in model.modules():
        if isinstance(module, Matrix):
            module.allocate()
    generator = torch.Generator(group.device)  # a failed capture may break torch's default one
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("scalar", "scale")):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)
    return model.eval()


def _empty_model(
    kind: type[AnyModel], config: ModelConfig, group: TensorParallelGroup, dtype: torch.dtype
) -> AnyModel:
    """Build a model in `dtype` on the group's device: without its matrices, and uninitialized."""
    with init_empty_weights(include_buffers=True):  # no memory is allocated yet
        model = kind(config, group)
    for module in model.modules():
        if isinstance(module, Matrix):  # allocated by loading, in the form in which it is stored
            module.prepare(dtype, group.device)
            continue
        own = torch.float32 if getattr(module, "in_float32", False) else dtype
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=own, device=group.device)
            setattr(module, name, Parameter(empty, requires_grad=False))
    return model


def parameter_bytes(*models: Transformer) -> int:
    """Return the bytes of models' weights on this rank, and of the memory they are unpacked in.

    What they share counts once.
    """
    sizes = {id(each): each.nbytes for model in models for each in model.parameters()}
    sizes |= {id(model.scratch): model.scratch.nbytes for model in models}
    return sum(sizes.values())
