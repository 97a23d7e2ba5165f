"""Irregular files: functions that create one of each kind at a path."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path


def _socket(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(short := f"{folder}/socket")  # the limit of a bound path is 108 bytes
        os.rename(short, path)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "circular link": lambda path: path.symlink_to(path),
}
