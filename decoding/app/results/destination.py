"""Where the results of a batch go: a file of records, and perhaps others to read beside it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.app.options import FORMATS
from decoding.app.results.record_lines import last_records
from decoding.app.results.records import Records
from decoding.app.results.views import FileView, FolderView, View
from offload.errors import TierForceError

_BY_SUFFIX = {".md": "md", ".markdown": "md", ".txt": "txt", ".jsonl": "jsonl"}
_IN_FOLDER = "records.jsonl"


@dataclass(frozen=True)
class Destination:
    """The value of `--output`, a file or a folder with a file for each document, and its format."""

    path: Path
    format: str = "jsonl"
    is_folder: bool = False

    @classmethod
    def of(cls, output: str, format: str | None = None) -> Destination:
        """Return a destination; by default the format follows from the name.

        A path that ends in / is a folder. Raises TierForceError for an unknown format, or one to
        read in a file that is named as records are.
        """
        path = Path(output)
        if not output:
            raise TierForceError("--output is empty: name a file or a folder for the results.")
        if format is not None and format not in FORMATS:
            raise TierForceError(f"--format {format} is not known: use {', '.join(FORMATS)}.")
        if output.endswith("/") or path.is_dir():
            return cls(path, format or "md", is_folder=True)
        by_name = _BY_SUFFIX.get(path.suffix.lower())
        format = format or by_name or "jsonl"
        if format != "jsonl" and by_name == "jsonl":
            raise TierForceError(
                f"--output {path} is the name of a file of records: with --format {format} use "
                f"{path.with_suffix(f'.{format}')}, beside which the records are."
            )
        return cls(path, format)

    @property
    def records(self) -> Path:
        """The file of records."""
        if self.is_folder:
            return self.path / _IN_FOLDER
        if self.format == "jsonl":
            return self.path
        has_suffix = self.path.suffix.lower() in _BY_SUFFIX
        return self.path.with_name(f"{self.path.stem if has_suffix else self.path.name}.jsonl")

    @property
    def name(self) -> str:
        """The name of the file of records in messages."""
        option = f"--output {self.path}"
        return option if self.records == self.path else f"{self.records} (of {option})"

    def check_input(self, source: Path) -> None:
        """Raise TierForceError if an input is in the folder of results, or is it."""
        resolved = source.resolve()
        if self.is_folder and self.path.resolve() in (resolved, *resolved.parents):
            raise TierForceError(
                f"--output {self.path} is the folder of --input {source}, or holds it: name "
                "another folder for the results."
            )


class ResultFiles:
    """The files of a batch: records, and what is written from them to read.

    Only one job at a time can open them. Raises TierForceError if they cannot be written, or exist
    and are not results.
    """

    def __init__(self, destination: Destination, ids: Sequence[str]):
        """`ids` are those of all documents, in the order of the input."""
        self.destination, self._ids = destination, ids
        with self._report():
            if destination.is_folder:
                _prepare_folder(destination)
        self.records = Records(destination.records, destination.name)
        try:
            with self._report():
                self._view = self._make_view()
        except TierForceError:
            self.records.close()
            raise

    def _make_view(self) -> View:
        path, format = self.destination.path, self.destination.format
        if self.destination.is_folder:
            return FolderView(path, format, self._ids)
        # a link to the file is kept
        return View() if format == "jsonl" else FileView(Path(os.path.realpath(path)), format)

    def start(self, due: Collection[str]) -> None:
        """Write the results of all documents but these, which are due. Raises TierForceError."""
        with self._report():
            self._view.start(self._last(id for id in self._ids if id not in due))

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write the record of a document, and wait until it is on disk; return what was written.

        Raises TierForceError as `Records.append`. That a file to read cannot be written is reported
        by `finish`.
        """
        with suppress(OSError):
            self._view.discard(record["id"])
        record = self.records.append(record)
        with suppress(OSError):
            self._view.add(record)
        return record

    def finish(self) -> None:
        """Put all results into the order of the input. Raises TierForceError if that fails."""
        self.records.sort(self._ids)
        with self._report():
            self._view.finish(self._last(self._ids))

    def _last(self, ids: Iterable[str]) -> Iterator[dict[str, Any]]:
        return last_records(self.destination.records, self.destination.name, lambda _: ids)

    @contextmanager
    def _report(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierForceError(
                f"--output {self.destination.path} cannot be written: {error.strerror}. Finished "
                f"records are safe in {self.destination.records}."
            ) from error

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.records.close()
        if not self.destination.records.exists():  # there were no results
            with suppress(OSError):
                self._view.clear()


def _prepare_folder(destination: Destination) -> None:
    """Create the folder of results. Raises TierForceError if it has other files, and OSError."""
    folder = destination.path
    folder.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if names and not destination.records.exists():
        raise TierForceError(
            f"--output {folder} is a folder with other files, such as {min(names)}: name a new "
            f"one, for example {folder / 'results'}/."
        )
