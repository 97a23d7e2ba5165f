"""Tensor parallelism: process group, sharded Llama-family model, weight loading, launch. Knows nothing of sampling or drafts."""

from parallel.checkpoint import Checkpoint, CheckpointError
from parallel.config import ConfigError, ModelConfig, token_ids
from parallel.group import Group, RankLost, Recorder, on_device
from parallel.llama import Llama
from parallel.loading import load_model, parameter_bytes, random_model, resolve
from parallel.passes import PassLeader, Sharded, follow_passes
from parallel.replay import MOST_ROWS, Replay

__all__ = [
    "MOST_ROWS",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Group",
    "Llama",
    "ModelConfig",
    "PassLeader",
    "RankLost",
    "Recorder",
    "Replay",
    "Sharded",
    "follow_passes",
    "load_model",
    "on_device",
    "parameter_bytes",
    "random_model",
    "resolve",
    "token_ids",
]
