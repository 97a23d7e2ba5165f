"""Tensor parallelism: process group, sharded Llama-family model, weight loading, launch. Knows nothing of sampling or drafts."""

from parallel.checkpoint import Checkpoint, CheckpointError
from parallel.config import ConfigError, ModelConfig, token_ids
from parallel.group import Group, RankLost
from parallel.llama import Llama
from parallel.loading import load_model, parameter_bytes, random_model, resolve
from parallel.passes import PassLeader, Sharded, follow_passes
from parallel.replay import Replay

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Group",
    "Llama",
    "ModelConfig",
    "PassLeader",
    "RankLost",
    "Replay",
    "Sharded",
    "follow_passes",
    "load_model",
    "parameter_bytes",
    "random_model",
    "resolve",
    "token_ids",
]
