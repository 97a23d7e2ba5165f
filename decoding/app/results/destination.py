"""Where the results of a batch go: a file of records, and perhaps others to read beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.app.documents.listing import PARTS_SUFFIX
from decoding.app.results.record_lines import last_records
from decoding.app.results.records import Records
from decoding.app.results.rendering import check_format
from decoding.app.results.views import RECORDS, FileView, FolderView, View
from decoding.app.terminal.streams import warn
from offload.errors import TierForceError

_BY_SUFFIX = {".md": "md", ".markdown": "md", ".txt": "txt", ".jsonl": "jsonl"}


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
        if output == "-":
            raise TierForceError(
                "--output - is not supported: results are files, which `tierforce show` prints: "
                "name one, such as results.md."
            )
        if format is not None:
            check_format(format)
        if output.endswith("/") or os.path.isdir(output):
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
            return self.path / RECORDS
        if self.format == "jsonl":
            return self.path
        has_suffix = self.path.suffix.lower() in _BY_SUFFIX
        return self.path.with_name(f"{self.path.stem if has_suffix else self.path.name}.jsonl")

    @property
    def label(self) -> str:
        """The name of the file of records in messages."""
        option = f"--output {self.path}"
        return option if self.records == self.path else f"{self.records} (of {option})"

    def check_input(self, source: Path) -> None:
        """Raise TierForceError if an input is in the folder of results, or is one of its files."""
        given, own = os.path.realpath(source), os.path.realpath(self.path)
        if self.is_folder and given.startswith(f"{own.rstrip('/')}/"):
            raise TierForceError(
                f"--output {self.path} is a folder that has --input {source} in it: name another "
                "folder for the results."
            )
        if given in (own, os.path.realpath(self.records)):
            raise TierForceError(
                f"--output {self.path} would replace --input {source}: name another file or folder "
                "for the results."
            )


class ResultFiles:
    """The files of a batch: records, and what is written from them to read.

    Only one job at a time can open them. Raises TierForceError if they cannot be written, or exist
    and are not results.
    """

    def __init__(self, destination: Destination, ids: Sequence[str]):
        """`ids` are those of all documents, in the order of the input."""
        self.destination, self._ids = destination, ids
        self._has_warned = False
        self._created = list[Path]()  # folders
        with ExitStack() as undo:
            undo.callback(self._remove_created)
            with self._report():
                if destination.is_folder:
                    _check_folder(destination)
                    self._create(destination.path)
            self.records = Records(destination.records, destination.label)
            undo.callback(self.records.close)
            with self._report():
                self._view = self._make_view()
            undo.callback(self._view.close, has_results=True)
            self._check_view()
            undo.pop_all()

    def _create(self, folder: Path) -> None:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir()
                self._created.append(path)

    def _remove_created(self) -> None:
        with suppress(OSError):  # there are results
            for folder in reversed(self._created):
                folder.rmdir()

    def _make_view(self) -> View:
        path, format, mode = self.destination.path, self.destination.format, self.records.mode
        if self.destination.is_folder:
            return FolderView(path, format, mode, self._ids)
        if format == "jsonl":
            return View()
        real = os.path.realpath(path)  # a link to the file is kept
        if real == os.path.realpath(self.destination.records):
            raise TierForceError(
                f"--output {path} is a link to its own records: name another file."
            )
        return FileView(Path(real), format, mode)

    def _check_view(self) -> None:
        """Raise TierForceError if there are results without records, which would be lost."""
        if self.records.was_empty and not self._view.is_empty:
            raise TierForceError(
                f"--output {self.destination.path} has results, but their records in "
                f"{self.destination.records} are missing: choose another file."
            )

    def start(self) -> None:
        """Write the results that there are, also of documents that are processed again.

        An interrupted job loses none of them. Raises TierForceError.
        """
        try:
            self._view.write(self._last(self._ids))
        except OSError as error:
            if not self.destination.is_folder:  # one that cannot be written leaves the others
                raise self._unwritable(error) from error

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write the record of a document, and wait until it is on disk; return what was written.

        Raises TierForceError as `Records.append`. That its result cannot be written is a warning.
        """
        record = self.records.append(record)
        try:
            self._view.add(record)
        except OSError as error:
            if not self._has_warned:  # the end of the job tries again
                warn(str(self._unwritable(error)))
            self._has_warned = True
        return record

    def finish(self) -> None:
        """Put all results into the order of the input. Raises TierForceError if that fails."""
        try:
            self.records.sort(self._ids)
        finally:
            with self._report():
                self._view.write(self._last(self._ids))

    def _last(self, ids: Iterable[str]) -> Iterator[dict[str, Any]]:
        return last_records(self.destination.records, self.destination.label, lambda _: ids)

    @contextmanager
    def _report(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> TierForceError:
        where = f" ({error.filename})" if error.filename is not None else ""
        line = f"--output {self.destination.path} cannot be written: {error.strerror}{where}."
        if os.path.isfile(self.destination.records):
            line += f" The records of finished documents, in {self.destination.records}, are safe."
        return TierForceError(line)

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.records.close()
        with self._report():
            self._view.close(has_results=self.destination.records.exists())
        self._remove_created()


def _check_folder(destination: Destination) -> None:
    """Raise TierForceError if the folder of results has other files, and OSError."""
    folder = destination.path
    entries = folder.iterdir() if os.path.lexists(folder) else ()
    names = [path.name for path in entries if not path.name.startswith(".")]
    if names and {RECORDS, RECORDS + PARTS_SUFFIX}.isdisjoint(names):
        raise TierForceError(
            f"--output {folder} is a folder with other files, such as {min(names)}: name a new "
            f"one, for example {folder / 'results'}/."
        )
