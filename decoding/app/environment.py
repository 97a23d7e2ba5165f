"""What surrounds a command: variables that libraries read when they are loaded, and versions.

A program that has an engine of its own decides on these itself, so nothing but a command sets
variables, and only those that the user has not set.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version

_DEFAULTS = {
    # Threads of OpenMP that wait for others sleep. By default they spin, and with a busy neighbour
    # on the same cores a token takes several times as long (docs/log.md).
    "OMP_WAIT_POLICY": "passive",
    # Kernels that oneDNN, and torch itself, keep: by default 1,024 of 0.3 MB each. Drafts and
    # prompts of other lengths make others, and hardly a text has those of another.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    # What fails in torch is told in a line of ours, without a stack of C++.
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}


def set_environment_defaults(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set; to be called before torch is imported."""
    for name, value in _DEFAULTS.items():
        variables.setdefault(name, value)


def installed_version(name: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
