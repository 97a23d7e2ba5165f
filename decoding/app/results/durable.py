"""Writes that are on disk when they return."""

from __future__ import annotations

import os
from io import FileIO

PADDING = b"\0 \t\r\n"  # left by file systems in place of a line lost to a power failure


def write_all(file: FileIO, content: bytes) -> None:
    """Write all of `content`, and wait until it is on disk. Raises OSError."""
    while content:
        # after a partial write to a full disk, the next one raises
        content = content[file.write(content) :]
    os.fsync(file.fileno())
