"""Paths that are not regular files: each kind with a function that creates it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path


def _socket(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(short := f"{folder}/socket")  # a path of over 108 bytes cannot be bound
        os.rename(short, path)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "link in a circle": lambda path: path.symlink_to(path),
}
