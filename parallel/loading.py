"""From a name to a model in memory: find the folder, build on the meta device, fill shard by shard."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch.nn import Parameter

from offload import TierForceError, one_line
from parallel.checkpoint import Checkpoint, CheckpointError
from parallel.config import ModelConfig
from parallel.group import Group
from parallel.llama import Llama

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PATIENCE = 10.0  # seconds for the hub to answer
_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]


def resolve(name: str, group: Group) -> Path:
    """A local folder as it is; anything else as a hub name, fetched once by rank 0. Raises CheckpointError."""
    if Path(name).is_dir():
        return Path(name)
    with group.together():
        folder = _download(name) if group.rank == 0 else Path()
    return group.broadcast(folder)


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    if Path(name).exists():
        raise CheckpointError(f"{name} is a file; a model is a folder with config.json, tokenizer and safetensors weights.")
    silence = None
    try:
        HfApi().model_info(name, timeout=_PATIENCE)  # snapshot_download would wait for a silent network for ever
    except Exception as error:  # the hub client's errors share no base class
        silence = error
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=silence is not None))
    except Exception as error:
        reason = one_line(silence or error)
        raise CheckpointError(f"{name} is neither a local folder nor a model the hub could give ({reason}).") from error


def pick_dtype(wanted: str, config: ModelConfig, checkpoint: Checkpoint, group: Group) -> torch.dtype:
    """`auto` is the checkpoint's own dtype, except that a CPU, which is hopeless at float16, takes it as float32, unrounded."""
    if wanted != "auto" and wanted not in DTYPES:
        raise TierForceError(f"--dtype {wanted} is not known: use auto, {', '.join(DTYPES)}.")
    dtype = DTYPES[wanted] if wanted != "auto" else config.dtype or checkpoint.dtype
    if dtype == torch.float16 and group.device.type == "cpu":
        if wanted != "auto":
            raise TierForceError("float16 is not supported on a CPU: use --dtype float32, or bfloat16.")
        return torch.float32
    return dtype


def load_model(folder: Path, group: Group, dtype: str = "auto", config: ModelConfig | None = None) -> Llama:
    """The model of a folder, this rank's share of it on this rank's device. Raises ConfigError or CheckpointError."""
    config = config or ModelConfig.from_pretrained(folder)
    config.kv_layout(group.size, torch.float32)  # refuses ranks that do not divide the heads, before anything is read
    checkpoint = Checkpoint(folder)
    kind = pick_dtype(dtype, config, checkpoint, group)
    with init_empty_weights():
        model = Llama(config, group)
    _materialise(model, kind, group.device)
    with torch.inference_mode():
        model.load(checkpoint)
    return model.eval()


def random_model(config: ModelConfig, group: Group, dtype: torch.dtype) -> Llama:
    """A model of these dimensions with weights that were drawn: it costs what a real one costs, and says nothing."""
    with init_empty_weights():
        model = Llama(config, group)
    _materialise(model, dtype, group.device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    return model.eval()


def _materialise(model: Llama, dtype: torch.dtype, device: torch.device) -> None:
    """Replace meta parameters by empty ones, each once: tied modules stay tied."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False))


def parameter_bytes(model: Llama) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
