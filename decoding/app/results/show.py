"""`show`: the results of a batch, on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from decoding.app.options import FORMATS
from decoding.app.results.destination import Destination
from decoding.app.results.record_lines import last_records
from decoding.app.results.rendering import render
from decoding.app.terminal.streams import write
from offload.errors import TierForceError

_MAX_NAMES = 20  # ids in an error


def run(results: str, documents: Sequence[str], format: str) -> None:
    """Print the last record of each document with one of these ids or patterns; by default of all.

    `results` is the `--output` of a batch, or its file of records. Raises TierForceError if that
    cannot be read, or has no such record.
    """
    if format not in FORMATS:
        raise TierForceError(f"--format {format} is not known: use {', '.join(FORMATS)}.")
    path = Destination.of(results).records
    if not path.exists():
        path = Path(results)

    def choose(ids: Sequence[str]) -> Sequence[str]:
        chosen = dict[str, None]()
        for wanted in documents:
            found = [id for id in ids if id == wanted or fnmatchcase(id, wanted)]
            if not found:
                raise TierForceError(f"{path} has no record of {wanted!r}: it has {_names(ids)}.")
            chosen |= dict.fromkeys(found)
        return list(chosen) if documents else ids

    count = 0
    try:
        for record in last_records(path, str(path), choose):
            if count and format != "jsonl":
                write("\n")
            write(render(record, format))
            count += 1
    except OSError as error:
        raise TierForceError(f"{path} cannot be read: {error.strerror}.") from error
    if not count:
        raise TierForceError(f"{path} has no records.")


def _names(ids: Sequence[str]) -> str:
    more = len(ids) - _MAX_NAMES
    names = ", ".join(ids[:_MAX_NAMES]) or "none"
    return f"{names} and {more} more" if more > 0 else names
