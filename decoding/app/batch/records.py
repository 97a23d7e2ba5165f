"""The output file: one JSON record a line, on disk before the next document starts, and good to
resume from.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from decoding.app.batch.documents import MAX_BYTES
from offload.errors import TierForceError
from offload.regular_files import bounded_lines, open_regular


@dataclass(frozen=True)
class Finished:
    """What later runs need to know of a finished record."""

    digest: str | None  # of all that shaped its summary, by `Job.digest`; old records have none
    cut: bool  # whether the document was longer than the context


class Records:
    """A JSONL file that records are appended to.

    Opening it repairs a torn last line and drops error records, whose documents are due again.
    Only one job at a time may hold a file. Raises TierForceError when the file cannot be written,
    is held, or is not such a file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._place = Path(os.path.realpath(path))  # a link to the file stays one
        try:
            self._new = not self._place.exists()
            if not (self._new or self._place.is_dir() or self._place.is_file()):
                raise TierForceError(
                    f"--output {path} is a pipe or a device: records need a regular file."
                )
            self._file = self._held(self._place.open("ab", buffering=0))
            self.finished: dict[str, Finished] = {}
            if self._needs_repair():
                self._replace()
            self._sync_folder()
        except OSError as error:
            raise self._unwritable(error) from error

    def append(self, record: dict[str, Any]) -> None:
        """Write one record and wait until it is on disk.

        Raises TierForceError when the disk will not take it.
        """
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        # an id may have what UTF-8 cannot say: JSON can, by the same escape
        line = text.encode(errors="backslashreplace")
        try:
            _write(self._file, line)
        except OSError as error:
            raise self._unwritable(error, " Finished records are safe.") from error
        if "error" not in record:
            self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        self.finished[record["id"]] = Finished(
            record.get("digest"), bool(record.get("truncated_tokens"))
        )

    def _held(self, file: FileIO) -> FileIO:
        """Lock the file for this job, and return it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a repair may have put another in its place
            held = os.path.samestat(os.fstat(file.fileno()), self._place.stat())
        except BlockingIOError:
            held = False
        if not held:
            raise TierForceError(
                f"--output {self.path} is being written by another job; wait for it, or choose "
                "another file."
            )
        return file

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield the file's lines but for a torn last one, each with the record that it is.

        Of a line that is too long for a record it yields the beginning. Raises OSError.
        """
        with open_regular(self._place) as file:
            for _, line in bounded_lines(file, MAX_BYTES):
                if len(line) > MAX_BYTES:
                    yield line, None
                elif line.endswith(b"\n") or not _torn(line):
                    yield line, _record(line)

    def _needs_repair(self) -> bool:
        """Note what is finished; return whether there is anything else, which a repair leaves out.

        Raises TierForceError for a line that no job wrote, so that no other file is harmed.
        """
        size, ours, blank = 0, False, 0  # bytes of whole finished records; the first blank line
        for number, (line, record) in enumerate(self._lines(), 1):
            if record is not None:
                ours = True
                if "summary" in record:
                    self._check_version(record, number)
                    self._note(record)  # of several records of one id the last counts
                    size += len(line) if line.endswith(b"\n") else 0
            elif len(line) <= MAX_BYTES and not line.strip(_PADDING + b"\n"):
                blank = blank or number
            else:
                # a file that has nothing but blank lines was ours too, before a power loss
                number = number if ours or not blank else blank
                raise TierForceError(
                    f"--output {self.path} exists, but its line {number} is not a summary record; "
                    "choose another file."
                )
        return size != os.fstat(self._file.fileno()).st_size

    def _check_version(self, record: dict[str, Any], number: int) -> None:
        """Raise TierForceError for a record of a version whose fields had other names."""
        if _OLD_FIELDS & record.keys():
            raise TierForceError(
                f"--output {self.path}: line {number} is a record of tierforce 0.1, whose fields "
                "had other names: choose another file."
            )

    def _replace(self) -> None:
        """Swap the file for a repaired copy, in one step: a crash leaves the one or the other."""
        repaired = self._place.with_name(self._place.name + ".repair")
        file = repaired.open("wb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
        with open(file.fileno(), "wb", closefd=False) as buffered:
            for line, record in self._lines():
                if record is not None and "summary" in record:
                    buffered.write(line.removesuffix(b"\n") + b"\n")
        os.fsync(file.fileno())
        repaired.replace(self._place)
        self._file.close()
        self._file = file

    def _sync_folder(self) -> None:
        """Wait until the file's name, too, is on disk."""
        folder = os.open(self._place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _unwritable(self, error: OSError, more: str = "") -> TierForceError:
        return TierForceError(f"--output {self.path} cannot be written: {error.strerror}.{more}")

    def close(self) -> None:
        """Let go of the file, and leave none behind where no record was written."""
        if self._new and not os.fstat(self._file.fileno()).st_size:
            with suppress(OSError):
                self._place.unlink()
        self._file.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# fields of finished records that version 0.2 renamed (docs/formats.md)
_OLD_FIELDS = {"budget", "dropped_tokens", "fixed_shapes", "identical", "passes", "texts_at_once"}
_PADDING = b"\0 \t\r"  # what file systems leave of a line whose bytes a power loss took


def _write(file: FileIO, content: bytes) -> None:
    while content:
        # what did not fit on the disk raises when it is tried again
        content = content[file.write(content) :]
    os.fsync(file.fileno())


def _torn(line: bytes) -> bool:
    """Tell whether this is what a crash leaves behind the last newline: a record's beginning."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return b'{"id": '.startswith(line[:7])
    return False


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, of a finished document or a failed one; None for neither."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(record, dict) and isinstance(record.get("id"), str) and "versions" in record
    return record if ours and ("summary" in record) != ("error" in record) else None
