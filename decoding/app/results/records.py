"""The output file: one JSON record per line, each on disk before the next document starts; a later
run can resume from it.
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

from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.documents.listing import REPAIR_SUFFIX
from decoding.app.results.durable import PADDING, write_all
from decoding.app.results.part_answers import PartAnswers
from decoding.prefix_cache.files import sync_folder
from offload.errors import InvalidRequestError, TierForceError
from offload.regular_files import bounded_lines, open_regular


@dataclass(frozen=True)
class Finished:
    """The fields of a finished record that later runs need."""

    digest: str | None  # `BatchJob.digest`; None in old records
    is_truncated: bool  # the document's end was dropped
    # those for parts and for merging, if the document was split
    part_instructions: tuple[str, str] | None = None
    cut: int = 0  # answers that have an error in place of data


class Records:
    """A JSONL file that records are appended to.

    Opening it repairs a torn last line and drops error records, so that their documents are
    processed again. Only one job at a time can open a file. Raises TierForceError if the file
    cannot be written, is locked, or holds anything else.
    """

    def __init__(self, path: Path):
        self.path = path
        self._real_path = Path(os.path.realpath(path))  # a link to the file is kept
        try:
            self._is_new = not self._real_path.exists()
            if not (self._is_new or self._real_path.is_dir() or self._real_path.is_file()):
                raise TierForceError(
                    f"--output {path} is a pipe or a device: records need a regular file."
                )
            self._file = self._lock(self._real_path.open("ab", buffering=0))
            self.finished: dict[str, Finished] = {}
            if self._needs_repair():
                self._replace()
            sync_folder(self._real_path.parent)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            mode = stat.S_IMODE(os.fstat(self._file.fileno()).st_mode)
            self.parts = PartAnswers(self._real_path, mode)
        except TierForceError:
            self._close_file()
            raise

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write one record, and wait until it is on disk; return what was written.

        That is an error record in place of one too long for a later run to read. Raises
        TierForceError if writing fails.
        """
        line = _line(record)
        if len(line) > MAX_BYTES:
            reason = (
                f"its record would have {len(line) >> 20} MiB, more than a later run reads "
                f"({MAX_BYTES >> 20}): ask fewer questions at a time. The answers are kept."
            )
            kept = ("id", "date", "versions")
            record = {name: value for name, value in record.items() if name in kept}
            record |= {"error": reason, "kind": InvalidRequestError.__name__}
            line = _line(record)
        try:
            write_all(self._file, line)
        except OSError as error:
            raise self._unwritable(error, " Finished records are safe.") from error
        if "error" not in record:
            self._remember(record)
            self.parts.finish(record["id"])
        return record

    def _remember(self, record: dict[str, Any]) -> None:
        instructions = None
        if "part_instruction" in record:
            instructions = record["part_instruction"], record.get("merge_instruction", "")
        self.finished[record["id"]] = Finished(
            record.get("digest"),
            bool(record.get("truncated_tokens")),
            instructions,
            sum("error" in each for each in record.get("answers", ())),
        )

    def _lock(self, file: FileIO) -> FileIO:
        """Lock the file for this job, and return it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a repair may have replaced the file
            is_locked = os.path.samestat(os.fstat(file.fileno()), self._real_path.stat())
        except BlockingIOError:
            is_locked = False
        if not is_locked:
            raise TierForceError(
                f"--output {self.path} is being written by another job; wait for it, or choose "
                "another file."
            )
        return file

    def _whole_lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield the lines of the file except a torn last one, each with its record, if it is one.

        A line too long for a record is truncated. Raises OSError.
        """
        with open_regular(self._real_path) as file:
            for _, line in bounded_lines(file, MAX_BYTES):
                if len(line) > MAX_BYTES:
                    yield line, None
                elif line.endswith(b"\n") or not _is_torn(line):
                    yield line, _parse_record(line)

    def _needs_repair(self) -> bool:
        """Collect the finished records; return whether the file has content to drop.

        Raises TierForceError for a line that no job wrote, so that no other file is damaged.
        """
        size = 0  # bytes of complete finished records
        has_records, first_blank = False, 0
        for number, (line, record) in enumerate(self._whole_lines(), 1):
            if record is not None:
                has_records = True
                if is_finished(record):
                    self._check_version(record, number)
                    self._remember(record)  # the last record of an id wins
                    size += len(line) if line.endswith(b"\n") else 0
            elif len(line) <= MAX_BYTES and not line.strip(PADDING):
                first_blank = first_blank or number
            else:
                # A power loss can leave blank lines only; before foreign content, report the first.
                number = number if has_records or not first_blank else first_blank
                raise TierForceError(
                    f"--output {self.path} exists, but its line {number} is not a summary record; "
                    "choose another file."
                )
        return size != os.fstat(self._file.fileno()).st_size

    def _check_version(self, record: dict[str, Any], number: int) -> None:
        """Raise TierForceError for a record of version 0.1, whose fields had other names."""
        if _OLD_FIELDS & record.keys():
            raise TierForceError(
                f"--output {self.path}: line {number} is a record of tierforce 0.1, whose fields "
                "had other names: choose another file."
            )

    def _replace(self) -> None:
        """Replace the file with a repaired copy, atomically: a crash leaves one or the other."""
        repaired = self._real_path.with_name(self._real_path.name + REPAIR_SUFFIX)
        file = repaired.open("wb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
        with open(file.fileno(), "wb", closefd=False) as buffered:
            for line, record in self._whole_lines():
                if record is not None and is_finished(record):
                    buffered.write(line.removesuffix(b"\n") + b"\n")
        os.fsync(file.fileno())
        repaired.replace(self._real_path)
        self._file.close()
        self._file = file

    def _unwritable(self, error: OSError, hint: str = "") -> TierForceError:
        return TierForceError(f"--output {self.path} cannot be written: {error.strerror}.{hint}")

    def close(self) -> None:
        """Close the file; delete it if it is new and empty."""
        self.parts.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._is_new and not os.fstat(self._file.fileno()).st_size:
            with suppress(OSError):
                self._real_path.unlink()
        self._file.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# fields of finished records that version 0.2 renamed (docs/formats.md)
_OLD_FIELDS = {"budget", "dropped_tokens", "fixed_shapes", "identical", "passes", "texts_at_once"}


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # UTF-8 cannot encode surrogates in an id; as escapes they are valid JSON
    return text.encode(errors="backslashreplace")


def _is_torn(line: bytes) -> bool:
    """Return whether an unterminated last line is the beginning of a record, as a crash leaves."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return b'{"id": '.startswith(line[:7])
    return False


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, finished or failed; None if it is neither."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    is_record = "versions" in record and is_finished(record) != ("error" in record)
    return record if is_record else None


def is_finished(record: dict[str, Any]) -> bool:
    """Return whether a record is that of a finished document."""
    return "summary" in record or "answers" in record
