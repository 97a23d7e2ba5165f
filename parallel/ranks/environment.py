"""This process's rank, from the environment variables set by torchrun and `launch`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from offload.errors import TierForceError

_PR_SET_PDEATHSIG = 1  # option of Linux's prctl
_MAX_PORT = 65535


class RankLost(TierForceError):
    """A collective failed because another rank has ended."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process in its group, and among the ranks on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_from_env(variables: Mapping[str, str] = os.environ) -> RankInfo:
    """Return the rank given by RANK, WORLD_SIZE and their local counterparts.

    A process is a rank only if both RANK and WORLD_SIZE are set and the group has at least two
    ranks: with a stray `RANK=1` in a cluster's shell the process runs alone.

    Raises TierForceError for invalid values.
    """
    size = _number(variables, "WORLD_SIZE", 1)
    if size == 1 or "RANK" not in variables:
        return RankInfo()
    rank = _number(variables, "RANK", 0)
    info = RankInfo(
        rank,
        size,
        _number(variables, "LOCAL_RANK", rank),
        _number(variables, "LOCAL_WORLD_SIZE", size),
    )
    if not (0 <= info.rank < info.size and 0 <= info.local_rank < info.local_size <= info.size):
        raise TierForceError(
            f"the environment says rank {info.rank} of {info.size}, local rank {info.local_rank}"
            f" of {info.local_size}, which is not a valid rank: unset RANK, WORLD_SIZE, "
            "LOCAL_RANK and LOCAL_WORLD_SIZE, or start through --gpus or torchrun."
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]:
        raise TierForceError(
            f"RANK and WORLD_SIZE={size} are set, but not {' and '.join(missing)}, so the other "
            "ranks cannot be found: unset RANK and WORLD_SIZE to run alone, or start through "
            "--gpus or torchrun."
        )
    if (port := _number(variables, "MASTER_PORT", 0)) > _MAX_PORT:
        raise TierForceError(f"MASTER_PORT={port} in the environment is not a port: unset it.")
    return info


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is already a rank started by torchrun or `launch`.

    Raises TierForceError for a broken environment.
    """
    return rank_from_env(variables).size > 1 or "TORCHELASTIC_RUN_ID" in variables


def die_with_parent() -> None:
    """Have the kernel kill this rank when its launcher dies, so that it does not hold its GPU.

    Finished results are on disk, so nothing needs cleaning up. Does nothing without a launcher.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") and "RANK" in os.environ:
        end_with_parent(os.getppid())


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent, which had this process id, has ended."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the prctl
        os._exit(128 + signal.SIGKILL)


def ignored_variables(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher variables that are set but ignored, for a warning; None without any."""
    if rank_from_env(variables).size > 1:
        return None
    defaults = {"RANK": "0", "WORLD_SIZE": "1"}  # values that a launcher sets for a single process
    settings = [
        f"{name}={variables[name]}"
        for name, value in defaults.items()
        if variables.get(name, value) != value
    ]
    return " and ".join(settings) or None


def warn_from_rank(rank: int, line: str) -> None:
    """Print a warning to standard error, even on ranks where the command line redirects it."""
    stream = sys.stderr if rank == 0 else sys.__stderr__
    with suppress(OSError, ValueError, AttributeError):
        print(f"warning: {line}", file=stream, flush=True)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    try:
        value = int(variables.get(name, default))
    except ValueError as error:
        raise TierForceError(
            f"{name}={variables[name]} in the environment is not a whole number: unset it."
        ) from error
    if value < 0:
        raise TierForceError(f"{name}={value} in the environment is below 0: unset it.")
    return value
