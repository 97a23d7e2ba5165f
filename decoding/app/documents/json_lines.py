"""Documents as JSON lines with `id` and `text`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoding.app.documents.formats.encodings import MAX_BYTES, decode_unicode, unknown_encoding
from offload.errors import InvalidRequestError
from offload.regular_files import bounded_lines, open_regular

_MAX_ID_LENGTH = 4096  # characters, as for a path


def lines(source: Path) -> Iterator[tuple[int, str | None, int, int]]:
    """Yield the number, id, size and offset of each line that is not blank; the id is None if the
    line has none, which its record will report.

    Raises OSError.
    """
    with open_regular(source) as file:
        for number, (offset, raw) in enumerate(bounded_lines(file, MAX_BYTES), 1):
            if raw.strip():
                name = _line_id(raw) if len(raw) <= MAX_BYTES else None
                yield number, name, len(raw), offset


def line_text(raw: bytes, name: str) -> str:
    """Return the text of a line. Raises InvalidRequestError, also if its id has changed."""
    if (decoded := decode_unicode(raw)) is None:
        raise unknown_encoding(raw, "JSON must be")
    value = _parse(decoded[0])
    if str(value["id"]) != name:
        raise InvalidRequestError(
            "the file has changed since it was listed: its line now holds another document."
        )
    text = value.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError('the line must have a string "text".')
    return text


def _line_id(raw: bytes) -> str | None:
    try:
        return str(_parse(raw.decode("utf-8-sig"))["id"])
    except (InvalidRequestError, UnicodeDecodeError):
        return None


def _parse(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not JSON: {error}.") from error
    id = value.get("id") if isinstance(value, dict) else None
    is_id = isinstance(id, str | int) and not isinstance(id, bool)
    if not is_id or not 0 < len(str(id)) <= _MAX_ID_LENGTH:
        raise InvalidRequestError(
            'the line must be an object whose "id" is a whole number or a non-empty string of '
            f"at most {_MAX_ID_LENGTH:,} characters."
        )
    return value
