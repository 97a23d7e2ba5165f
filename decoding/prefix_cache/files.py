"""Atomic file writes, and file locks that end with the process."""

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

_POLL_S = 0.02  # seconds between two attempts to lock


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk. Raises OSError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Create or replace a file atomically. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{token_hex(4)}")
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flush a folder's directory entries to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """Return the path of a file with the state of a rank's part of a prompt.

    Kinds: `lock`, locked while the rank writes; `json`, the checksums once it has finished;
    `given-up`, present if writing was cancelled.
    """
    return folder / f"rank-{rank}.{kind}"


@contextmanager
def file_lock(path: Path, timeout_s: float = math.inf) -> Iterator[None]:
    """Hold a file's lock; the file is created if it is missing.

    Raises OSError, also if another process holds the lock for longer than `timeout_s` seconds, and
    UnsuitableFileError if the path is not a regular file.
    """
    deadline = time.monotonic() + timeout_s
    try:
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except UnsuitableFileError as error:
        raise UnsuitableFileError(
            error.errno, f"{path.name} in it is not a regular file"
        ) from error
    with file:
        while not _try_lock(file.fileno()):
            if time.monotonic() >= deadline:
                why = f"another job has held its {path.name} for {timeout_s:g} s"
                raise OSError(errno.ETIMEDOUT, why)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            # a forked child may have inherited the file and its lock
            fcntl.flock(file, fcntl.LOCK_UN)


def hold_lock(path: Path) -> ExitStack:
    """Lock a file until the returned stack is closed, or the process ends. Raises OSError."""
    stack = ExitStack()
    stack.enter_context(file_lock(path))
    return stack


def is_locked(path: Path) -> bool:
    """Return whether any process holds a file's lock; True if it cannot be determined."""
    try:
        with file_lock(path, timeout_s=0):
            return False
    except UnsuitableFileError:
        return False  # not a lock file of ours
    except OSError:
        return True


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
