"""Files that a command writes beside its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offload.errors import TierForceError
from offload.regular_files import SMALL, read_regular


def write_json(option: str, path: Path, content: dict[str, Any]) -> None:
    """Write a JSON document to what `option` names. Raises TierForceError where it cannot be."""
    with _writing(option, path):
        path.write_text(json.dumps(content, indent=2) + "\n")


def check_writable(option: str, path: Path) -> None:
    """Raise TierForceError where a file cannot be written; what stands there is left."""
    with _writing(option, path):
        there = path.exists()
        if there and not path.is_file():  # a folder, a device, or a pipe, which would be waited for
            raise TierForceError(f"{option} {path} is not a regular file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not there:
            path.unlink()


def check_json_suffix(option: str, path: Path) -> None:
    """Raise TierForceError where something else stands that would be written over."""
    content = b""
    with _writing(option, path), suppress(FileNotFoundError):
        content = read_regular(path, SMALL)
    try:
        is_ours = not content or isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise TierForceError(
            f"{option} {path} is there already, and is no JSON object: name another file."
        )


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierForceError(f"{option} {path} cannot be written ({error.strerror}).") from error
    except ValueError as error:
        raise TierForceError(f"{option} {path} is no name of a file ({error}).") from error
