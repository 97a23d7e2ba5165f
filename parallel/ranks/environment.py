"""Which rank this process is, by the variables that torchrun and our own launcher set."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from offload.errors import TierForceError

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_MAX_PORT = 65535


class RankLost(TierForceError):
    """A collective failed because another rank is gone."""


@dataclass(frozen=True)
class RankInfo:
    """A process among the ranks of its group, and among those on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_from_env(variables: Mapping[str, str] = os.environ) -> RankInfo:
    """Read RANK, WORLD_SIZE and their local counterparts.

    A process is a rank only where all of a launcher's variables are there and name a group of at
    least two: a `RANK=1` left over in a cluster's shell is no group, and its process works alone.

    Raises TierForceError for values that name no place in a group.
    """
    size = _number(variables, "WORLD_SIZE", 1)
    if size == 1 or "RANK" not in variables:
        return RankInfo()
    rank = _number(variables, "RANK", 0)
    place = RankInfo(
        rank,
        size,
        _number(variables, "LOCAL_RANK", rank),
        _number(variables, "LOCAL_WORLD_SIZE", size),
    )
    if not (
        0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size
    ):
        raise TierForceError(
            f"the environment says rank {place.rank} of {place.size}, local rank {place.local_rank}"
            f" of {place.local_size}, which is no place in a group: unset RANK, WORLD_SIZE, "
            "LOCAL_RANK and LOCAL_WORLD_SIZE, or start through --gpus or torchrun."
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]:
        raise TierForceError(
            f"RANK and WORLD_SIZE={size} are set, but not {' and '.join(missing)}, so the other "
            "ranks cannot be found: unset RANK and WORLD_SIZE to work alone, or start through "
            "--gpus or torchrun."
        )
    if (port := _number(variables, "MASTER_PORT", 0)) > _MAX_PORT:
        raise TierForceError(f"MASTER_PORT={port} in the environment is no port: unset it.")
    return place


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process is already a rank, of torchrun or of `launch`.

    Raises TierForceError for a broken environment.
    """
    return rank_from_env(variables).size > 1 or "TORCHELASTIC_RUN_ID" in variables


def die_with_parent() -> None:
    """Let the kernel end this rank when its launcher dies, whichever way: it would keep its GPU.

    What is finished is on disk, so there is nothing to unwind. Does nothing without a launcher.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") and "RANK" in os.environ:
        launcher = os.getppid()
        with suppress(OSError, AttributeError):  # another system than Linux
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has died meanwhile
            os._exit(128 + signal.SIGKILL)


def ignored_variables(variables: Mapping[str, str] = os.environ) -> str | None:
    """Name a launcher's variables that are set and mean nothing here, for a warning; None where
    there are none.
    """
    if rank_from_env(variables).size > 1:
        return None
    meaningless = {"RANK": "0", "WORLD_SIZE": "1"}  # what a process alone would be given
    left_over = [
        f"{name}={variables[name]}"
        for name, value in meaningless.items()
        if variables.get(name, value) != value
    ]
    return " and ".join(left_over) or None


def warn_from_rank(rank: int, line: str) -> None:
    """Print a warning to standard error, also on ranks where the command line silences it."""
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
