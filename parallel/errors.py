"""What is wrong with a model on disk. It needs neither torch nor transformers."""

from offload.errors import TierForceError


class ConfigError(TierForceError):
    """The config is missing, unreadable, or describes a model that is not supported."""


class CheckpointError(TierForceError):
    """The weights are missing, broken, or of a kind that is not read."""
