"""Documents as JSON lines: objects with `id` and `text`, and perhaps instructions of their own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoding.app.documents.formats.encodings import MAX_BYTES, decode_unicode, unknown_encoding
from decoding.text.encoding import check_whole_characters
from decoding.text.instructions import Instructions
from offload.errors import InvalidRequestError
from offload.regular_files import bounded_lines, open_regular

_FIELDS = {"id", "text", "instruction", "questions"}
_MAX_UNKNOWN = 100  # other fields that are counted
_MAX_NAME = 60  # characters of their names
_MAX_ID_LENGTH = 4096  # characters, as for a path


def lines(source: Path, unknown: Counter[str]) -> Iterator[tuple[int, str | None, int, int]]:
    """Yield the number, id, size and offset of each line that is not blank; the id is None if the
    line has none, which its record will report.

    Fields that are not read are counted in `unknown`, up to 100 of them. Raises OSError.
    """
    with open_regular(source) as file:
        for number, (offset, raw) in enumerate(bounded_lines(file, MAX_BYTES), 1):
            if raw.strip():
                value = _value(raw) if len(raw) <= MAX_BYTES else {}
                for name in sorted(value.keys() - _FIELDS):
                    short = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."
                    if short in unknown or len(unknown) < _MAX_UNKNOWN:
                        unknown[short] += 1
                yield number, str(value["id"]) if value else None, len(raw), offset


def read_line(raw: bytes, name: str) -> tuple[str, Instructions | None]:
    """Return the text of a line, and its own instructions if it has any.

    Raises InvalidRequestError, also if its id has changed.
    """
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
    return text, _instructions(value)


def _instructions(value: dict[str, Any]) -> Instructions | None:
    """Return the instructions in a line; null counts as none. Raises InvalidRequestError."""
    instruction, questions = value.get("instruction"), value.get("questions")
    if instruction is None and questions is None:
        return None
    if instruction is not None and questions is not None:
        raise InvalidRequestError(
            'the line has both "instruction" and "questions": leave one of them out.'
        )
    own: Any = [instruction] if questions is None else questions
    is_list = isinstance(own, list) and len(own) > 0
    if not is_list or not all(isinstance(each, str) and each.strip() for each in own):
        raise InvalidRequestError(
            'the line\'s "instruction" must be a string that is not blank.'
            if questions is None
            else 'the line\'s "questions" must be a list of strings that are not blank.'
        )
    for each in own:
        check_whole_characters(each)
    return Instructions(tuple(own), questions is not None)


def _value(raw: bytes) -> dict[str, Any]:
    """Return the object in a line; empty if there is none."""
    try:
        return _parse(raw.decode("utf-8-sig"))
    except (InvalidRequestError, UnicodeDecodeError):
        return {}


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
