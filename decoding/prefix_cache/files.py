"""Files that are there whole or not at all, and locks that end with the process."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

from offload.regular_files import UnsuitableFileError, open_regular

_POLL_S = 0.02  # between two tries of a lock


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file, to the disk itself. Raises OSError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in another's place, at once. Raises OSError."""
    new = path.with_name(f"{path.name}.{token_hex(4)}")
    try:
        write_synced(new, content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Let the disk have the names of a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """Return a file that says how far a rank is with its part of a prompt.

    Kinds: `lock`, which it has locked as long as it writes; `json`, the checksums of what it has
    written; `given-up`, where it will not write it.
    """
    return folder / f"rank-{rank}.{kind}"


@contextmanager
def locked(path: Path, limit_s: float = math.inf) -> Iterator[None]:
    """Hold a file's lock; the file is created if it is missing.

    Raises OSError, also where another process has held the lock for `limit_s` seconds, and
    UnsuitableFileError for what is no regular file.
    """
    until = time.monotonic() + limit_s
    try:
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except UnsuitableFileError as error:
        raise UnsuitableFileError(error.errno, f"{path.name} in it is no regular file") from error
    with file:
        while not _try_lock(file.fileno()):
            if time.monotonic() >= until:
                why = f"another job has held its {path.name} for {limit_s:g} s"
                raise OSError(errno.ETIMEDOUT, why)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            # a forked child may have the file, too, and with it the lock
            fcntl.flock(file, fcntl.LOCK_UN)


def hold_lock(path: Path) -> ExitStack:
    """Lock a file until the stack that is returned is closed, or the process ends.

    Raises OSError.
    """
    stack = ExitStack()
    stack.enter_context(locked(path))
    return stack


def is_locked(path: Path) -> bool:
    """Return whether some process holds a file's lock, or may do so where that cannot be told."""
    try:
        with locked(path, limit_s=0):
            return False
    except UnsuitableFileError:
        return False  # no process of ours has made it
    except OSError:
        return True


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
