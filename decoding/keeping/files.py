"""Files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


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
def locked(path: Path) -> Iterator[None]:
    """Wait for a file's lock, and hold it; the file is made where there is none. Raises OSError."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Tell whether some process holds a file's lock. Raises OSError."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False
