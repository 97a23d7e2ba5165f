"""Reading files that somebody else may have put there: never a pipe, a device or without a bound.

A pipe would be waited for and a device may have no end, so only regular files are read. A file's
size says little (files of /proc have none, sparse ones take no disk), so what is read at once is
limited, too.
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
SMALL = MIB  # bytes, more than any file that people write by hand
_BLOCK = MIB  # bytes that are passed over at once
# opening a folder to write, a link in a circle, a socket, a device that is not there
_IRREGULAR = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)


class UnsuitableFileError(OSError):
    """A file that is there and cannot be what is expected: not regular, or too large."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> BufferedReader | BufferedRandom:
    """Open a regular file, without waiting for anything; `flags` are those of `os.open`.

    Raises OSError; UnsuitableFileError for a folder, a pipe, a socket or a device. What is looked
    at is what was opened, whatever takes its place meanwhile.
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
    """Return what is in a regular file of at most `limit` bytes.

    Raises OSError; UnsuitableFileError as `open_regular` does, and for a larger file.
    """
    with open_regular(path) as file:
        # before memory is taken, which reading so many bytes would take at once
        if os.fstat(file.fileno()).st_size <= limit:
            content = file.read(limit + 1) or b""  # None of a file of /proc that would wait
            if len(content) <= limit:
                return content
    raise _unsuitable(path, f"it has more than {limit:,} bytes")


def read_json(path: Path, limit: int = 8 * MIB) -> Any:
    """Return the content of a regular JSON file of at most `limit` bytes.

    Raises OSError as `read_regular` does, and ValueError for what is no JSON in UTF-8 or is nested
    too deeply.
    """
    try:
        return json.loads(read_regular(path, limit).decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def bounded_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each line begins, and the line with its end: of a longer one `limit` + 1 bytes.

    The rest of that is passed over when the next line is taken.
    """
    offset = 0
    while line := file.readline(limit + 1):
        yield offset, line
        offset += len(line)
        while not line.endswith(b"\n") and (line := file.readline(_BLOCK)):
            offset += len(line)


def _unsuitable(path: Path, why: str) -> UnsuitableFileError:
    return UnsuitableFileError(errno.EINVAL, why, str(path))
