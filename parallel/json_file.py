"""JSON files that somebody else wrote, read within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from stat import S_ISREG
from typing import Any

MIB = 1 << 20


def read_json(path: Path, limit: int = 8 * MIB) -> Any:
    """Return the content of a JSON file of at most `limit` bytes.

    Raises OSError where it cannot be read, and ValueError for what is no JSON, is larger, or is
    nested too deeply.
    """
    status = path.stat()
    if not S_ISREG(status.st_mode):  # a pipe or a device may never end
        raise ValueError("it is not a regular file")
    if status.st_size > limit:
        raise ValueError(f"it has {status.st_size:,} bytes, and at most {limit:,} are read")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
