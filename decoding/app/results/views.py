"""Results to read, written from records: one file of all documents, or one for each."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

from decoding.app.documents.formats.encodings import MAX_BYTES
from decoding.app.documents.listing import PARTS_SUFFIX, RESULT_MARK
from decoding.app.results.durable import replace_file, write_all
from decoding.app.results.record_lines import parse_record
from decoding.app.results.rendering import render
from decoding.app.terminal.streams import printable
from offload.errors import TierForceError
from offload.regular_files import open_regular

RECORDS = "records.jsonl"  # in a folder of results
# the first bytes of a file that a job wrote
_MARKS = {"md": f"<!-- {RESULT_MARK} -->\n".encode(), "txt": f"{RESULT_MARK}\n".encode()}
_SEPARATORS = {"md": b"\n", "txt": b"\n\n"}  # before each document
_SUFFIXES = {"jsonl": ".json", "md": ".md", "txt": ".txt"}  # files of one document
_MAX_NAME = 200  # bytes of a file's name; file systems allow 255
_MAX_PATH, _MAX_FOLDERS = 1_000, 16  # bytes and folders of a path; systems allow 4,096 bytes

Record = Mapping[str, Any]


class View:
    """What is written beside the records: nothing. Methods of subclasses raise OSError."""

    is_empty = True  # whether there are no results of an earlier job

    def write(self, records: Iterable[Record]) -> None:
        """Write all results, in the order of the input."""

    def add(self, record: Record) -> None:
        """Write the result of a document that has just finished."""

    def close(self, has_results: bool) -> None:
        """End the job."""


class FileView(View):
    """A file of all documents: each is appended as it finishes; at the end they are in order.

    Only one job at a time can have the file.
    """

    def __init__(self, path: Path, format: str, mode: int):
        """Open the file; `mode` is for a new one.

        Raises OSError, and TierForceError if another job has it, or no job wrote it in this format.
        """
        self._path, self._format, self._mode = path, format, mode
        self._file: FileIO | None = None
        self._exists = path.exists()
        if self._exists:
            with open_regular(path, os.O_RDWR) as file:
                self._file = FileIO(os.dup(file.fileno()), "r+")
            try:
                self._check(path)
            except TierForceError:
                self._file.close()
                raise

    def _check(self, path: Path) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TierForceError(
                f"--output {path} is being written by another job; wait for it, or choose another "
                "file."
            ) from error
        mark = _MARKS[self._format]
        found = self._file.read(len(mark) + 1) or b""
        if found and not found.startswith(mark):
            raise TierForceError(
                f"--output {path} exists, and is no {self._format} file that a job wrote: choose "
                "another file."
            )
        self.is_empty = len(found) <= len(mark)

    def write(self, records: Iterable[Record]) -> None:
        pieces = chain([_MARKS[self._format]], map(self._section, records))
        file = replace_file(self._path, pieces, self._mode)
        if self._file is not None:
            self._file.close()
        self._file = file

    def add(self, record: Record) -> None:
        assert self._file is not None
        end = self._file.tell()
        try:
            write_all(self._file, self._section(record))
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
                self._file.seek(end)
            raise

    def close(self, has_results: bool) -> None:
        if self._file is None:
            return
        if not has_results and self.is_empty:
            if self._exists:
                self._file.truncate(0)
            else:
                self._path.unlink(missing_ok=True)
        self._file.close()

    def _section(self, record: Record) -> bytes:
        return _SEPARATORS[self._format] + _encode(render(record, self._format))


class FolderView(View):
    """A folder with a file for each document, named after it."""

    def __init__(self, folder: Path, format: str, mode: int, ids: Sequence[str]):
        """`mode` is for new files. Raises TierForceError if no job wrote the file of a document."""
        self._format, self._mode = format, mode
        self._real_folder = os.path.realpath(folder)
        names = file_names(ids, _SUFFIXES[format])
        self._paths = {id: folder / name for id, name in names.items()}
        for path in self._paths.values():
            if os.path.lexists(path):
                if not self._is_ours(path):
                    raise TierForceError(
                        f"{path} exists, and is no {format} file that a job wrote: move it away, "
                        "or choose another --output."
                    )
                self.is_empty = False

    def write(self, records: Iterable[Record]) -> None:
        first: OSError | None = None
        missing = set(self._paths)
        for record in records:
            missing.discard(record["id"])
            try:
                self.add(record)
            except OSError as error:
                first = first or error
        for id in missing:  # a file there is another document's
            with suppress(OSError):
                if self._is_ours(self._paths[id]):
                    self._paths[id].unlink()
        if first is not None:
            raise first

    def add(self, record: Record) -> None:
        path = self._paths[record["id"]]
        content = _encode(render(record, self._format))
        if self._format != "jsonl":
            content = _MARKS[self._format] + _SEPARATORS[self._format] + content
        with suppress(FileNotFoundError), open_regular(path) as file:
            if file.read(len(content) + 1) == content:
                return
        if os.path.lexists(path) and not self._is_ours(path):
            raise FileExistsError(errno.EEXIST, "no job wrote what is there", str(path))
        if not Path(os.path.realpath(path.parent)).is_relative_to(self._real_folder):
            raise FileExistsError(errno.EEXIST, "a link leads out of the folder", str(path.parent))
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [content], self._mode).close()

    def _is_ours(self, path: Path) -> bool:
        """Return whether a job wrote a file, in this format."""
        try:
            with open_regular(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
                if self._format == "jsonl":
                    return parse_record(file.read(MAX_BYTES)) is not None
                mark = _MARKS[self._format]
                return file.read(len(mark)) == mark
        except OSError:
            return False


def file_names(ids: Iterable[str], suffix: str) -> dict[str, str]:
    """Return a path below a folder for each document: its id with `suffix` where that is possible.

    No path leads into a file, or is one of the job's own. They differ also where case does not
    count.
    """
    names, numbers = dict[str, str](), Counter[str]()
    files, folders = {RECORDS, RECORDS + PARTS_SUFFIX}, set[str]()  # without case

    def is_free(name: str) -> bool:
        own = name.casefold()
        taken = own in files or own in folders
        return not taken and files.isdisjoint(_parents(own))

    for id in ids:
        parts = [_component(each) for each in id.split("/") if each not in ("", ".", "..")]
        flat = _component("_".join(parts) or "document")
        path = "/".join(parts[:_MAX_FOLDERS]) or flat
        is_short = len(parts) <= _MAX_FOLDERS and len(path.encode()) <= _MAX_PATH
        candidates = [path, flat] if is_short else [flat]
        name = next(filter(is_free, (each + suffix for each in candidates)), "")
        while not name or not is_free(name):
            numbers[flat.casefold()] += 1
            name = f"{flat} ({numbers[flat.casefold()] + 1}){suffix}"
        names[id] = name
        files.add(name.casefold())
        folders.update(_parents(name.casefold()))
    return names


def _parents(name: str) -> list[str]:
    """Return the folders of a path, without the whole one."""
    return [name[:index] for index, char in enumerate(name) if char == "/"]


def _component(name: str) -> str:
    """Return the name of a file or folder, which is shorter if file systems do not allow it."""
    name = printable(name)
    encoded = name.encode()
    if len(encoded) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return f"{encoded[: _MAX_NAME - len(digest) - 1].decode(errors='ignore')}-{digest}"


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # surrogates in an id
