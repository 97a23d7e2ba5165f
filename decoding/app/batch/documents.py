"""The input documents: a folder of text files, one file, or JSON lines with `id` and `text`."""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_LE
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.text.encoding import check_whole_characters
from offload.errors import InvalidRequestError, TierForceError
from offload.regular_files import UnsuitableFileError, bounded_lines, open_regular

SUFFIXES = (".txt", ".md")
MAX_BYTES = 32 << 20  # per document or line: some 8 million tokens, more than any context
MAX_DOCUMENTS = 1_000_000
_MAX_ID_LENGTH = 4096  # characters, as for a path


@dataclass(frozen=True)
class Document:
    """The location of a document, which is read only when it is processed."""

    id: str
    path: Path
    size: int  # bytes
    offset: int | None = None  # byte offset of its line in a JSONL file

    def read(self) -> str:
        """Return the text.

        Raises InvalidRequestError if it is empty, binary, not UTF-8, too large, or gone.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset or 0)
                limit = MAX_BYTES + 1
                raw = (file.read(limit) or b"") if self.offset is None else file.readline(limit)
        except UnsuitableFileError as error:
            raise InvalidRequestError(
                f"{self.path} is not a regular file: save its text to one first."
            ) from error
        except OSError as error:
            raise InvalidRequestError(f"{self.path} cannot be read: {error.strerror}.") from error
        text = decode_text(raw)
        if self.offset is not None:
            text = _line_text(text, self.id)
        if not text.strip():
            raise InvalidRequestError("the document is empty.")
        return text


def decode_text(raw: bytes) -> str:
    """Decode the bytes of a document.

    Raises InvalidRequestError if they are not UTF-8 text, or more than MAX_BYTES.
    """
    if len(raw) > MAX_BYTES:
        raise InvalidRequestError(
            f"the document is larger than {MAX_BYTES >> 20} MiB, more than any context holds: "
            "split it into parts."
        )
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) and not raw.startswith(BOM_UTF32_LE):
        raise InvalidRequestError(
            "the document is UTF-16, not UTF-8. Convert it first: iconv -f utf-16 -t utf-8."
        )
    if b"\0" in raw:
        raise InvalidRequestError(
            "the document has NUL bytes: it is binary, or UTF-16 without a byte order mark. "
            "Save it as UTF-8 text."
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the document is not UTF-8: byte {error.start} is {raw[error.start]:#04x}. Convert"
            " it first; for Latin-1: iconv -f latin1 -t utf-8."
        ) from error


@dataclass(frozen=True)
class Listing:
    """The documents of a source."""

    documents: list[Document]
    skipped: int = 0  # files of a folder without a text suffix
    unreadable: tuple[Path, ...] = ()  # folders that cannot be listed, and broken links


def find_documents(source: Path, output: Path | None = None) -> Listing:
    """List the documents of a folder (recursively, sorted by name), a text file or a .jsonl file.

    The file `output`, which may lie in the folder, is left out.

    Raises TierForceError if there are no documents, the source cannot be read, or two documents
    share an id.
    """
    try:
        if source.is_dir():
            listing = _folder_listing(source, output)
        elif source.exists() and not source.is_file():
            raise TierForceError(
                f"--input {source} is a pipe or a device: give a folder or a regular file."
            )
        elif source.suffix.lower() == ".json":
            raise TierForceError(
                f"--input {source} is JSON, which would be read as one document: give a .jsonl "
                f"file with one object per line. To convert a list: jq -c '.[]' {source.name} > "
                f"{source.with_suffix('.jsonl').name}; if it has one object per line, rename it."
            )
        elif source.suffix.lower() == ".jsonl":
            listing = Listing(_line_documents(source))
        else:
            with source.open("rb"):
                listing = Listing([Document(source.name, source, source.stat().st_size)])
    except OSError as error:
        raise TierForceError(f"--input {source} cannot be read: {error.strerror}.") from error
    _check_count(source, len(listing.documents))
    if not listing.documents:
        what = f"no {' or '.join(SUFFIXES)} file" if source.is_dir() else "no line"
        raise TierForceError(f"--input {source} has {what}: there is nothing to summarise.")
    _check_unique_ids(source, listing.documents)
    return listing


def _folder_listing(source: Path, output: Path | None) -> Listing:
    output_path = output.resolve() if output is not None else None
    found, unreadable = _walk(source)
    files = [path for path in found if path.resolve() != output_path]
    text_files = sorted(path for path in files if path.suffix.lower() in SUFFIXES)
    documents = [Document(str(path.relative_to(source)), path, _size(path)) for path in text_files]
    return Listing(documents, len(files) - len(text_files), tuple(sorted(unreadable)))


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone, which reading it will report."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _walk(source: Path) -> tuple[list[Path], list[Path]]:
    """Return all files below a folder, following links, and the paths that cannot be read.

    A folder reached by several paths is searched once. Raises OSError for the folder itself.
    """
    files, unreadable = list[Path](), list[Path]()
    visited = set[tuple[int, int]]()
    folders, links = [source], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            if folder == source:
                raise
            unreadable.append(folder)
            continue
        for entry in entries:
            path = folder / entry.name
            try:
                if entry.is_file():
                    files.append(path)
                elif entry.is_dir():
                    (links if entry.is_symlink() else folders).append(path)
                elif entry.is_symlink() and not path.exists():
                    unreadable.append(path)
            except OSError:  # a circular link
                unreadable.append(path)
    return files, unreadable


def _check_unique_ids(source: Path, documents: Sequence[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise TierForceError(
                f"--input {source}: the id {document.id!r} appears more than once: ids must be "
                "unique."
            )
        seen.add(document.id)


def _line_documents(source: Path) -> list[Document]:
    lines = list[tuple[int, str | None, int, int]]()
    with open_regular(source) as file:
        for number, (offset, raw) in enumerate(bounded_lines(file, MAX_BYTES), 1):
            if raw.strip():
                name = _line_id(raw) if len(raw) <= MAX_BYTES else None
                lines.append((number, name, len(raw), offset))
            _check_count(source, len(lines))
    ids = {name for _, name, _, _ in lines if name is not None}
    documents = []
    for number, name, size, offset in lines:
        if name is None:
            name = f"line {number}"
            while name in ids:  # the id of another document
                name += " (no id)"
        documents.append(Document(name, source, size, offset))
    return documents


def _check_count(source: Path, documents: int) -> None:
    if documents > MAX_DOCUMENTS:
        raise TierForceError(
            f"--input {source} has more than {MAX_DOCUMENTS:,} documents: split it into parts."
        )


def _line_id(raw: bytes) -> str | None:
    """Return the id of a line; None if it has none, which its record will report."""
    try:
        return str(_parse_line(raw.decode("utf-8-sig"))["id"])
    except (InvalidRequestError, UnicodeDecodeError):
        return None


def _parse_line(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not JSON: {error}.") from error
    id = value.get("id") if isinstance(value, dict) else None
    is_id = isinstance(id, str | int) and not isinstance(id, bool)
    if not is_id or not 0 < len(str(id)) <= _MAX_ID_LENGTH:
        raise InvalidRequestError(
            'the line must be an object whose "id" is a whole number or a non-empty string of '
            f"at most {_MAX_ID_LENGTH:,} characters."
        )
    return value


def _line_text(line: str, name: str) -> str:
    """Return the text of a line. Raises InvalidRequestError, also if its id has changed."""
    value = _parse_line(line)
    if str(value["id"]) != name:
        raise InvalidRequestError(
            "the file has changed since it was listed: its line now holds another document."
        )
    text = value.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError('the line must have a string "text".')
    check_whole_characters(text)
    return text
