"""Errors about a model on disk; imports neither torch nor transformers."""

from offload.errors import TierForceError


class ConfigError(TierForceError):
    """The config is missing, unreadable, or describes a model that is not supported."""


class CheckpointError(TierForceError):
    """The weights are missing, broken, or in an unsupported format."""
