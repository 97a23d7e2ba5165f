"""From a name to a model in memory: find the folder, build on the meta device, fill shard by
shard.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch.nn import Parameter

from offload.errors import TierForceError
from parallel.checkpoint import Checkpoint, CheckpointError
from parallel.config import ModelConfig
from parallel.group import Group
from parallel.hub import NotThere, fetch_model
from parallel.model import Llama

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]


def resolve(name: str, group: Group) -> Path:
    """A local folder as it is; anything else as a hub name, fetched once by rank 0. Raises
    CheckpointError.
    """
    if Path(name).is_dir():
        return Path(name)
    with group.together():
        folder = _download(name) if group.rank == 0 else Path()
    return group.broadcast(folder)


def _download(name: str) -> Path:
    if Path(name).exists():
        raise CheckpointError(
            f"{name} is a file; a model is a folder with config.json, tokenizer and safetensors "
            "weights."
        )
    try:
        return fetch_model(name, _PATTERNS)
    except NotThere as error:
        raise CheckpointError(
            f"{name} is neither a local folder nor a model the hub could give ({error})."
        ) from error


def pick_dtype(
    wanted: str, config: ModelConfig, checkpoint: Checkpoint, group: Group
) -> torch.dtype:
    """`auto` is the checkpoint's own dtype, except that a CPU, which is hopeless at float16, takes
    it as float32, unrounded.
    """
    if wanted != "auto" and wanted not in DTYPES:
        raise TierForceError(f"--dtype {wanted} is not known: use auto, {', '.join(DTYPES)}.")
    name = config.dtype if wanted == "auto" else wanted
    if name is not None and name not in DTYPES:
        raise TierForceError(
            f"the model's config says dtype {name}, in which no model is run here: use --dtype "
            f"{' or '.join(DTYPES)}."
        )
    dtype = checkpoint.dtype if name is None else DTYPES[name]
    if dtype == torch.float16 and group.device.type == "cpu":
        if wanted != "auto":
            raise TierForceError(
                "float16 is not supported on a CPU: use --dtype float32, or bfloat16."
            )
        return torch.float32
    return dtype


def load_model(
    folder: Path, group: Group, dtype: str = "auto", config: ModelConfig | None = None
) -> Llama:
    """The model of a folder, this rank's share of it on this rank's device. Raises ConfigError or
    CheckpointError.
    """
    config = config or ModelConfig.from_pretrained(folder)
    # refuses ranks that do not divide the heads, before anything is read
    config.kv_layout(group.size, torch.float32)
    checkpoint = Checkpoint(folder)
    kind = pick_dtype(dtype, config, checkpoint, group)
    model = _empty_model(config, group, kind)
    with torch.inference_mode():
        model.load(checkpoint)
    return model.eval()


def random_model(config: ModelConfig, group: Group, dtype: torch.dtype) -> Llama:
    """A model of these dimensions with weights that were drawn: it costs what a real one costs, and
    says nothing.
    """
    model = _empty_model(config, group, dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return model.eval()


def _empty_model(config: ModelConfig, group: Group, dtype: torch.dtype) -> Llama:
    """Built on the meta device, its parameters then replaced by empty ones, each once: tied modules
    stay tied.
    """
    with init_empty_weights():
        model = Llama(config, group)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=dtype, device=group.device)
                setattr(module, name, Parameter(empty, requires_grad=False))
    return model


def parameter_bytes(model: Llama) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
