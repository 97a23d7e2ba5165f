"""Environment variables that libraries read when imported, and versions of packages.

Only commands set variables, and only those that the user has not set: a program with its own engine
decides for itself.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version

# Before they sleep, threads of GNU's OpenMP spin this many times. With 2,000 an idle machine is 2%
# faster, and beside a busy process a token takes twice as long, not 1.5 times (docs/log.md).
_SPINS = "100"
_DEFAULTS = {
    # Waiting OpenMP threads sleep. By default they spin: with other busy processes on the same
    # cores, a token takes several times as long (docs/log.md).
    "OMP_WAIT_POLICY": "passive",
    # Kernels that oneDNN and torch cache, by default 1,024 of 0.3 MB each. Each draft and prompt
    # length compiles its own, which other requests rarely reuse.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    # Our own line reports errors in torch, without a C++ stack.
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}


def set_environment_defaults(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the user has not set. Call this before torch is imported."""
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", _SPINS)
    for name, value in _DEFAULTS.items():
        variables.setdefault(name, value)


def installed_version(name: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
