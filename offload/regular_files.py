"""Reading untrusted files: only regular ones, and no more than a limit.

Reading a pipe would block and a device may never end, so only regular files are read. A file's size
is not reliable (files in /proc report none, sparse files take no disk), so reads are limited, too.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MIB = 1 << 20
SMALL = MIB  # bytes; more than any file written by hand
_BLOCK = MIB  # bytes skipped at a time
# opening a folder for writing, a symbolic link loop, a socket, a missing device
_IRREGULAR = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)


class UnsuitableFileError(OSError):
    """A file exists but is not regular, or is too large."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> BufferedReader | BufferedRandom:
    """Open a regular file without blocking; `flags` are those of `os.open`.

    Raises OSError; UnsuitableFileError for a folder, a pipe, a socket or a device. The check is of
    the opened file, even if the path is replaced meanwhile.
    """
    try:
        handle = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        if error.errno in _IRREGULAR:
            raise _unsuitable(path, "it is not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _unsuitable(path, "it is not a regular file")
        if flags & os.O_RDWR:
            return os.fdopen(handle, "rb+")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises OSError; UnsuitableFileError as `open_regular` does, and for a larger file.
    """
    with open_regular(path) as file:
        # checked first, since reading allocates memory for the whole size
        if os.fstat(file.fileno()).st_size <= limit:
            content = file.read(limit + 1) or b""  # None for a file in /proc that would block
            if len(content) <= limit:
                return content
    raise _unsuitable(path, f"it has more than {limit:,} bytes")


def read_json(path: Path, limit: int = 8 * MIB) -> Any:
    """Return the content of a regular JSON file of at most `limit` bytes.

    Raises OSError as `read_regular` does, and ValueError if the content is not JSON in UTF-8 or is
    nested too deeply.
    """
    try:
        return json.loads(read_regular(path, limit).decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def bounded_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of each line, and the line with its end, cut to `limit` + 1 bytes.

    The rest of a longer line is skipped when the next is read.
    """
    offset = 0
    while line := file.readline(limit + 1):
        yield offset, line
        offset += len(line)
        while not line.endswith(b"\n") and (line := file.readline(_BLOCK)):
            offset += len(line)


def _unsuitable(path: Path, reason: str) -> UnsuitableFileError:
    return UnsuitableFileError(errno.EINVAL, reason, str(path))
