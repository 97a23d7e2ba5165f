"""Results to read, written from records: one file of all documents, or one for each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

from decoding.app.results.durable import append_file, replace_file
from decoding.app.results.rendering import render
from decoding.app.terminal.streams import printable
from offload.errors import TierForceError
from offload.regular_files import open_regular

_MARK = "Written by tierforce. Each run writes this file again from its records."
_FIRST_LINES = {"md": f"<!-- {_MARK} -->\n", "txt": f"{_MARK}\n"}
_SEPARATORS = {"md": "\n", "txt": "\n\n"}  # before each document
_SUFFIXES = {"jsonl": ".json", "md": ".md", "txt": ".txt"}  # files of one document
_MAX_NAME = 200  # bytes of a file's name; file systems allow 255

Record = Mapping[str, Any]


class View:
    """What is written beside the records: nothing. Methods of other classes raise OSError."""

    def start(self, records: Iterable[Record]) -> None:
        """Write the results that exist."""

    def discard(self, id: str) -> None:
        """Delete the result of a document that is about to have another one."""

    def add(self, record: Record) -> None:
        """Write the result of a document that has just finished."""

    def finish(self, records: Iterable[Record]) -> None:
        """Write all results, in the order of the input."""

    def clear(self) -> None:
        """Delete what was written, if there are no results."""


class FileView(View):
    """A file of all documents: each is appended as it finishes; at the end they are in order."""

    def __init__(self, path: Path, format: str):
        """Raises TierForceError if the file exists and no job wrote it, and OSError."""
        self._path, self._format = path, format
        first = _FIRST_LINES[format].encode()
        with suppress(FileNotFoundError), open_regular(path) as file:
            found = file.read(len(first))
            if found and found != first:
                raise TierForceError(
                    f"--output {path} exists and was not written by a job: choose another file."
                )

    def start(self, records: Iterable[Record]) -> None:
        sections = map(self._section, records)
        first = _FIRST_LINES[self._format].encode()
        replace_file(self._path, chain([first], sections)).close()

    def add(self, record: Record) -> None:
        append_file(self._path, self._section(record))

    def finish(self, records: Iterable[Record]) -> None:
        self.start(records)

    def clear(self) -> None:
        self._path.unlink()

    def _section(self, record: Record) -> bytes:
        return _encode(_SEPARATORS[self._format] + render(record, self._format))


class FolderView(View):
    """A folder with a file for each document, named after it. Files that exist stay as they are."""

    def __init__(self, folder: Path, format: str, ids: Sequence[str]):
        self._format = format
        names = file_names(ids, _SUFFIXES[format])
        self._paths = {id: folder / name for id, name in names.items()}

    def start(self, records: Iterable[Record]) -> None:
        with suppress(OSError):  # `finish` reports it
            self.finish(records)

    def discard(self, id: str) -> None:
        self._paths[id].unlink(missing_ok=True)

    def add(self, record: Record) -> None:
        path = self._paths[record["id"]]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = render(record, self._format)
        replace_file(path, [_encode(text)]).close()

    def finish(self, records: Iterable[Record]) -> None:
        first: OSError | None = None
        for record in records:
            try:
                if not self._paths[record["id"]].exists():
                    self.add(record)
            except OSError as error:
                first = first or error
        if first is not None:
            raise first


def file_names(ids: Iterable[str], suffix: str) -> dict[str, PurePosixPath]:
    """Return a path below a folder for each document: its id with `suffix` where that is possible.

    No path leads out of the folder, or into a file. They differ also where case does not count.
    """
    names = dict[str, PurePosixPath]()
    files, folders = set[str](), set[str]()  # without case

    def is_free(name: PurePosixPath) -> bool:
        parents = {str(parent).casefold() for parent in name.parents}
        own = str(name).casefold()
        return own not in files and own not in folders and not parents & files

    for id in ids:
        parts = [_component(each) for each in id.split("/") if each not in ("", ".", "..")]
        parts = parts or ["document"]
        flat = _component("_".join(parts))
        candidates = chain(["/".join(parts), flat], (f"{flat} ({number})" for number in count(2)))
        names_with_suffix = (PurePosixPath(f"{each}{suffix}") for each in candidates)
        chosen = next(filter(is_free, names_with_suffix))
        names[id] = chosen
        files.add(str(chosen).casefold())
        folders |= {str(parent).casefold() for parent in chosen.parents}
    return names


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
