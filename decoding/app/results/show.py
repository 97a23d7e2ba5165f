"""`show`: the results of a batch, on standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from decoding.app.documents.listing import is_result
from decoding.app.results.destination import Destination
from decoding.app.results.record_lines import last_records
from decoding.app.results.rendering import check_format, render
from decoding.app.terminal.streams import write
from offload.errors import TierForceError

_MAX_NAMES = 20  # ids in an error


def run(results: str, documents: Sequence[str], format: str) -> None:
    """Print the last record of each document with one of these ids or patterns; by default of all.

    `results` is the `--output` of a batch, or its file of records. Raises TierForceError if that
    cannot be read, or has no such record.
    """
    check_format(format)
    path = _records_of(results)

    def choose(ids: Sequence[str]) -> Sequence[str]:
        chosen = dict[str, None]()
        for wanted in documents:
            found = [wanted] if wanted in ids else [id for id in ids if fnmatchcase(id, wanted)]
            if not found:
                raise TierForceError(f"{path} has no record of {wanted!r}: it has {_names(ids)}.")
            chosen |= dict.fromkeys(found)
        return list(chosen) if documents else ids

    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    count = 0
    try:
        for record in last_records(path, str(path), choose):
            if format == "jsonl":
                write(json.dumps(record, ensure_ascii=not is_unicode) + "\n")
            else:
                write(("\n" if count else "") + render(record, format))
            count += 1
    except OSError as error:
        raise TierForceError(
            f"the records in {path} cannot be read: {error.strerror}. Name what --output named, or "
            "a file of records."
        ) from error
    if not count:
        raise TierForceError(f"{path} has no records.")


def _records_of(results: str) -> Path:
    """Return the file of records that `results` is, or has beside it, or in it."""
    path = Path(results)
    if results.endswith("/") or os.path.isdir(results):
        return Destination.of(results).records
    return Destination(path, "md").records if is_result(path) else path


def _names(ids: Sequence[str]) -> str:
    more = len(ids) - _MAX_NAMES
    names = ", ".join(ids[:_MAX_NAMES]) or "none"
    return f"{names} and {more} more" if more > 0 else names
