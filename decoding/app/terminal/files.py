"""Files that a command writes besides its main output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offload.errors import TierForceError
from offload.regular_files import SMALL, read_regular


def write_json(option: str, path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, the value of `option`. Raises TierForceError if it cannot be written."""
    with _report_write_errors(option, path):
        path.write_text(json.dumps(content, indent=2) + "\n")


def check_writable(option: str, path: Path) -> None:
    """Raise TierForceError if a file cannot be written; an existing one is left unchanged."""
    with _report_write_errors(option, path):
        exists = path.exists()
        if exists and not path.is_file():  # a folder, a device, or a pipe, which would block
            raise TierForceError(f"{option} {path} is not a regular file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not exists:
            path.unlink()


def check_overwrite(option: str, path: Path) -> None:
    """Raise TierForceError for an existing file that is not a JSON object, hence not ours."""
    content = b""
    with _report_write_errors(option, path), suppress(FileNotFoundError):
        content = read_regular(path, SMALL)
    try:
        is_ours = not content or isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise TierForceError(
            f"{option} {path} exists and is not a JSON object: choose another file."
        )


@contextmanager
def _report_write_errors(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierForceError(f"{option} {path} cannot be written ({error.strerror}).") from error
    except ValueError as error:
        raise TierForceError(f"{option} {path} is not a valid file name ({error}).") from error
