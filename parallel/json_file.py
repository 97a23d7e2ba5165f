"""JSON files that somebody else wrote, read within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload.regular_files import UnsuitableFileError, read_regular

MIB = 1 << 20


def read_json(path: Path, limit: int = 8 * MIB) -> Any:
    """Return the content of a JSON file of at most `limit` bytes.

    Raises OSError where it cannot be read, and ValueError for what is no JSON, is no regular file,
    is larger, or is nested too deeply.
    """
    try:
        return json.loads(read_regular(path, limit).decode())
    except UnsuitableFileError as error:
        raise ValueError(error.strerror) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
