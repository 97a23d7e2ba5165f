"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from offload.regular_files import UnsuitableFileError, open_regular


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


class Lock:
    """A file of a folder that is locked until it is let go of, or the process ends."""

    PATTERN = "rank-*.lock"

    def __init__(self, folder: Path, rank: int):
        """Make the file, which is not there yet, and lock it. Raises OSError."""
        self._file = self._path(folder, rank).open("x")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def let_go(self) -> None:
        # a child of this process may have the file, too, and with it the lock
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    @classmethod
    def wait(cls, folder: Path, rank: int) -> None:
        """Wait until a rank has let go of its lock. Raises OSError."""
        with locked(cls._path(folder, rank)):
            pass

    @staticmethod
    def _path(folder: Path, rank: int) -> Path:
        return folder / f"rank-{rank}.lock"


@contextmanager
def locked(path: Path, limit_s: float | None = None) -> Iterator[None]:
    """Wait for a file's lock, and hold it; the file is made where there is none.

    Raises OSError, also where somebody else has held it for `limit_s` seconds.
    """
    with _opened(path, os.O_CREAT) as file:
        _lock(file, path.name, limit_s)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: Path, flags: int = 0) -> BinaryIO:
    """Open a file to lock it. Raises OSError; UnsuitableFileError for what is no regular file."""
    try:
        return open_regular(path, os.O_RDWR | os.O_NOFOLLOW | flags)
    except UnsuitableFileError as error:
        raise UnsuitableFileError(error.errno, f"{path.name} in it is no regular file") from error


def _lock(file: BinaryIO, name: str, limit_s: float | None) -> None:
    if limit_s is None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return
    until = time.monotonic() + limit_s
    while not _try_lock(file):
        if time.monotonic() > until:
            raise OSError(errno.ETIMEDOUT, f"another job has held its {name} for {limit_s:g} s")
        time.sleep(0.02)


def _try_lock(file: BinaryIO) -> bool:
    """Take a file's lock if nobody holds it; tell whether that is so."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Tell whether some process holds a file's lock, or may do so, where that cannot be told."""
    try:
        with _opened(path) as file:
            if not _try_lock(file):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
    except UnsuitableFileError:
        return False  # no process of ours has made it
    except OSError:
        return True
    return False
