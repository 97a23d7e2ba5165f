"""Sampling, exact verification, nested decoders, the engine, batch summaries and the command line;
knows nothing of hardware.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.config.settings import Settings
    from decoding.engine.engine import Engine
    from decoding.grammars.grammar import Grammar
    from decoding.speculation.sampling import GREEDY, Sampling

__all__ = ["GREEDY", "Engine", "Grammar", "Sampling", "Settings"]
_MODULES = {
    "Engine": "decoding.engine.engine",
    "Grammar": "decoding.grammars.grammar",
    "GREEDY": "decoding.speculation.sampling",
    "Sampling": "decoding.speculation.sampling",
    "Settings": "decoding.config.settings",
}


def __getattr__(name: str) -> Any:
    """Import the names above on first use.

    The command line must run before torch is imported, to handle an interrupt during the import.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
