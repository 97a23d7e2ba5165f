"""Writes that are on disk when they return."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from decoding.app.documents.listing import REPAIR_SUFFIX

PADDING = b"\0 \t\r\n"  # left by file systems in place of a line lost to a power failure


def write_all(file: FileIO, content: bytes) -> None:
    """Write all of `content`, and wait until it is on disk. Raises OSError."""
    while content:
        # after a partial write to a full disk, the next one raises
        content = content[file.write(content) :]
    os.fsync(file.fileno())


def append_file(path: Path, content: bytes) -> None:
    """Append to a file, and wait until it is on disk. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        write_all(file, content)


def replace_file(path: Path, pieces: Iterable[bytes]) -> FileIO:
    """Create a file, or replace it atomically: a crash leaves the old one or the new one.

    Returns it, locked and open at its end. The mode of an old one is kept. Raises OSError.
    """
    copy = path.with_name(path.name + REPAIR_SUFFIX)
    file = copy.open("wb", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        with open(file.fileno(), "wb", closefd=False) as buffered:
            buffered.writelines(pieces)
        os.fsync(file.fileno())
        copy.replace(path)
    except OSError:
        file.close()
        with suppress(OSError):
            copy.unlink()
        raise
    return file
