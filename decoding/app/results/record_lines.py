"""The lines of a file of records, read without changing it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.results.durable import PADDING
from offload.errors import TierForceError
from offload.regular_files import bounded_lines, open_regular

# fields of finished records that version 0.2 renamed (docs/formats.md)
_OLD_FIELDS = {"budget", "dropped_tokens", "fixed_shapes", "identical", "passes", "texts_at_once"}


class RecordLine(NamedTuple):
    """The record of a document in a file: offset and size in bytes, with the line's end."""

    id: str
    offset: int
    size: int


def checked_records(file: BinaryIO, name: str) -> Iterator[tuple[RecordLine, dict[str, Any]]]:
    """Yield the records of a file, each with its line; a torn last line is left out.

    Raises OSError, and TierForceError for a line that is not a record, which calls the file `name`.
    """
    has_records, first_blank = False, 0
    for number, (offset, line, record) in enumerate(_whole_lines(file), 1):
        if record is not None:
            has_records = True
            if is_finished(record) and _OLD_FIELDS & record.keys():
                raise TierForceError(
                    f"{name}: line {number} is a record of tierforce 0.1, whose fields had other "
                    "names: choose another file."
                )
            size = len(line.removesuffix(b"\n")) + 1
            yield RecordLine(record["id"], offset, size), record
        elif len(line) <= MAX_BYTES and not line.strip(PADDING):
            first_blank = first_blank or number
        else:
            # A power loss can leave blank lines only; before foreign content, report the first.
            number = number if has_records or not first_blank else first_blank
            raise TierForceError(
                f"{name} exists, but its line {number} is not a summary record; choose another "
                "file."
            )


def last_records(
    path: Path, name: str, choose: Callable[[Sequence[str]], Iterable[str]]
) -> Iterator[dict[str, Any]]:
    """Yield the last record of documents, which is the one that counts.

    `choose` is called with the ids of all documents in the file, in the order of these records, and
    returns those to yield, in their order. Raises as `checked_records`.
    """
    last = dict[str, RecordLine]()
    with open_regular(path) as file:  # a job may replace it meanwhile
        for line, _ in checked_records(file, name):
            last.pop(line.id, None)
            last[line.id] = line
        chosen = [last[id] for id in choose(list(last)) if id in last]
        for content in read_lines(file, chosen):
            yield json.loads(content)


def read_lines(file: BinaryIO, lines: Iterable[RecordLine]) -> Iterator[bytes]:
    """Yield the content of lines, each with its end. Raises OSError."""
    for line in lines:
        file.seek(line.offset)
        yield file.read(line.size).removesuffix(b"\n") + b"\n"


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, finished or failed; None if it is neither."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    is_record = "versions" in record and is_finished(record) != ("error" in record)
    return record if is_record else None


def is_finished(record: Mapping[str, Any]) -> bool:
    """Return whether a record is that of a finished document."""
    return "summary" in record or "answers" in record


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield the offset of each line except a torn last one, the line, and its record, if it is one.

    A line too long for a record is truncated. Raises OSError.
    """
    for offset, line in bounded_lines(file, MAX_BYTES):
        if len(line) > MAX_BYTES:
            yield offset, line, None
        elif line.endswith(b"\n") or not _is_torn(line):
            yield offset, line, parse_record(line)


def _is_torn(line: bytes) -> bool:
    """Return whether an unterminated last line is the beginning of a record, as a crash leaves."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return b'{"id": '.startswith(line[:7])
    return False
