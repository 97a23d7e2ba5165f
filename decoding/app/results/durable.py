"""Writes that are on disk when they return."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from decoding.prefix_cache.files import sync_folder

_MAX_NAME = 200  # bytes; file systems allow 255
PADDING = b"\0 \t\r\n"  # left by file systems in place of a line lost to a power failure


def write_all(file: FileIO, content: bytes) -> None:
    """Write all of `content`, and wait until it is on disk. Raises OSError."""
    while content:
        # after a partial write to a full disk, the next one raises
        content = content[file.write(content) :]
    os.fsync(file.fileno())


def replace_file(path: Path, pieces: Iterable[bytes], mode: int | None = None) -> FileIO:
    """Create a file, or replace it atomically, and wait until it is on disk: a crash leaves the old
    one or the new one.

    Returns it, locked and open at its end. `mode` is for a new one; an old one keeps its own.
    Raises OSError, and what `pieces` does.
    """
    # hidden: users have no files of this name
    name = path.name.encode(errors="surrogateescape")[:_MAX_NAME].decode(errors="ignore")
    copy = path.with_name(f".{name}.tierforce")
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(copy.lstat().st_mode):  # not left by a crash
            raise FileExistsError(errno.EEXIST, "its copy is not a regular file", str(copy))
        copy.unlink()
    file = copy.open("xb", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        with open(file.fileno(), "wb", closefd=False) as buffered:
            buffered.writelines(pieces)
        os.fsync(file.fileno())
        copy.replace(path)
        sync_folder(path.parent)
    except Exception:
        file.close()
        with suppress(OSError):
            copy.unlink()
        raise
    return file
