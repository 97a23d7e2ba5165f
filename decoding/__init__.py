"""Sampling, exact verification, nested decoders, the engine, batch summaries and the command line. Knows nothing of hardware."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.engine import Engine
    from decoding.sampling import Sampling
    from decoding.settings import Settings

__all__ = ["Engine", "Sampling", "Settings"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for: the command line must come first, to end quietly while torch loads."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"decoding.{name.lower()}"), name)
