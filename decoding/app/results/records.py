"""The file of records: one JSON object per line, each on disk when its document has finished; a
later run can resume from it.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.results.durable import replace_file, write_all
from decoding.app.results.part_answers import PartAnswers
from decoding.app.results.record_lines import RecordLine, checked_records, is_finished, read_lines
from decoding.prefix_cache.files import sync_folder
from offload.errors import InvalidRequestError, TierForceError
from offload.regular_files import open_regular


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

    def __init__(self, path: Path, name: str | None = None):
        """Open the file, which messages call `name`, by default as the value of `--output`."""
        self.path, self._name = path, name or f"--output {path}"
        self._real_path = Path(os.path.realpath(path))  # a link to the file is kept
        try:
            self._is_new = not self._real_path.exists()
            if not (self._is_new or self._real_path.is_dir() or self._real_path.is_file()):
                raise TierForceError(
                    f"{self._name} is a pipe or a device: records need a regular file."
                )
            self._file = self._lock(self._real_path.open("ab", buffering=0))
        except OSError as error:
            raise self._unwritable(error) from error
        self.finished: dict[str, Finished] = {}
        try:
            status = os.fstat(self._file.fileno())
            self.was_empty, self.mode = not status.st_size, stat.S_IMODE(status.st_mode)
            if self._needs_repair():
                self._rewrite(line for line, record in self._checked() if is_finished(record))
            sync_folder(self._real_path.parent)
            self.parts = PartAnswers(self._real_path, self.mode)
        except OSError as error:
            self._close_file()
            raise self._unwritable(error) from error
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
        if "error" in record:
            self.finished.pop(record["id"], None)
        else:
            self._remember(record)
            self.parts.finish(record["id"])
        return record

    def sort(self, ids: Iterable[str]) -> None:
        """Put the last records of these documents into this order, after all other records.

        Raises TierForceError if that fails, which leaves the file as it is.
        """
        try:
            lines = [line for line, _ in self._checked()]
            last = {line.id: line for line in lines}
            own = {last[id]: None for id in ids if id in last}
            ordered = [*(line for line in lines if line not in own), *own]
            if ordered != lines:
                self._rewrite(ordered)
        except OSError as error:
            hint = " The records are safe, in the order in which their documents finished."
            raise self._unwritable(error, hint) from error

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
                f"{self._name} is being written by another job; wait for it, or choose "
                "another file."
            )
        return file

    def _needs_repair(self) -> bool:
        """Collect the finished records; return whether the file has content to drop.

        Raises TierForceError for a line that no job wrote, so that no other file is damaged.
        """
        size = end = 0  # bytes of finished records, and the end of the last one
        for line, record in self._checked():
            if is_finished(record):
                self._remember(record)  # the last record of an id wins
                size += line.size
                end = line.offset + line.size
        # the last line may lack its own end
        return size != os.fstat(self._file.fileno()).st_size or end != size

    def _checked(self) -> Iterator[tuple[RecordLine, dict[str, Any]]]:
        with open_regular(self._real_path) as file:
            yield from checked_records(file, self._name)

    def _rewrite(self, lines: Iterable[RecordLine]) -> None:
        """Replace the file with a copy of these lines. Raises OSError."""
        with open_regular(self._real_path) as old:
            file = replace_file(self._real_path, read_lines(old, lines))
        self._file.close()
        self._file = file

    def _unwritable(self, error: OSError, hint: str = "") -> TierForceError:
        return TierForceError(f"{self._name} cannot be written: {error.strerror}.{hint}")

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


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # UTF-8 cannot encode surrogates in an id; as escapes they are valid JSON
    return text.encode(errors="backslashreplace")
