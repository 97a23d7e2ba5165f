"""What is to be summarised: a folder of text, one file, or JSON lines with `id` and `text`."""

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
MAX_BYTES = 32 << 20  # of a text or a line, some 8 million tokens: more than any context
MAX_DOCUMENTS = 1_000_000
_MAX_ID = 4096  # characters, as many as a path has


@dataclass(frozen=True)
class Document:
    """Where one document's text is; it is read only when its turn comes."""

    id: str
    path: Path
    size: int  # bytes
    offset: int | None = None  # of its line in a JSONL file

    def read(self) -> str:
        """Return the text.

        Raises InvalidRequestError when it is empty, binary, not UTF-8, too large, or not there any more.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset or 0)
                most = MAX_BYTES + 1
                raw = (file.read(most) or b"") if self.offset is None else file.readline(most)
        except UnsuitableFileError as error:
            raise InvalidRequestError(
                f"{self.path} is no regular file: save its text to one first."
            ) from error
        except OSError as error:
            raise InvalidRequestError(f"{self.path} cannot be read: {error.strerror}.") from error
        text = decoded(raw)
        if self.offset is not None:
            text = _text(text, self.id)
        if not text.strip():
            raise InvalidRequestError("the document is empty.")
        return text


def decoded(raw: bytes) -> str:
    """Return the text of a document's bytes.

    Raises InvalidRequestError where they are none in UTF-8, or more than MAX_BYTES.
    """
    if len(raw) > MAX_BYTES:
        raise InvalidRequestError(
            f"the document has more than {MAX_BYTES >> 20} MiB, which is more than any context "
            "holds: split it into parts."
        )
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) and not raw.startswith(BOM_UTF32_LE):
        raise InvalidRequestError(
            "the document is UTF-16, not UTF-8. Convert it first: iconv -f utf-16 -t utf-8."
        )
    if b"\0" in raw:
        raise InvalidRequestError(
            "the document is binary, or UTF-16 that does not say so (it has NUL bytes): only text "
            "in UTF-8 can be read."
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the document is not UTF-8: byte {error.start} is {raw[error.start]:#04x}. Convert"
            " it first, if it is Latin-1 with: iconv -f latin1 -t utf-8."
        ) from error


@dataclass(frozen=True)
class Listing:
    """What a source holds."""

    documents: list[Document]
    skipped: int = 0  # files of a folder that are no text
    unread: tuple[Path, ...] = ()  # folders that cannot be listed, and links that lead nowhere


def find_documents(source: Path, output: Path | None = None) -> Listing:
    """List the documents of a folder (searched through, by name), a text file, or a .jsonl file.

    The file `output`, which may lie in the folder, is no document.

    Raises TierForceError when there is none, when the source cannot be read, or when two share an
    id.
    """
    try:
        if source.is_dir():
            listing = _folder(source, output)
        elif source.exists() and not source.is_file():
            raise TierForceError(
                f"--input {source} is a pipe or a device: give a folder or a regular file."
            )
        elif source.suffix.lower() == ".json":
            raise TierForceError(
                f"--input {source} is JSON, and would be read as one text: give a .jsonl file with "
                f"an object a line. From a list: jq -c '.[]' {source.name} > "
                f"{source.with_suffix('.jsonl').name}; if it has an object a line, name it so."
            )
        elif source.suffix.lower() == ".jsonl":
            listing = Listing(_lines(source))
        else:
            with source.open("rb"):
                listing = Listing([Document(source.name, source, source.stat().st_size)])
    except OSError as error:
        raise TierForceError(f"--input {source} cannot be read: {error.strerror}.") from error
    _check_count(source, len(listing.documents))
    if not listing.documents:
        what = f"no {' or '.join(SUFFIXES)} file" if source.is_dir() else "no line"
        raise TierForceError(f"--input {source} holds {what}: there is nothing to summarise.")
    _check_unique_ids(source, listing.documents)
    return listing


def _folder(source: Path, output: Path | None) -> Listing:
    ours = output.resolve() if output is not None else None
    found, unread = _files(source)
    files = [path for path in found if path.resolve() != ours]
    texts = sorted(path for path in files if path.suffix.lower() in SUFFIXES)
    documents = [Document(str(path.relative_to(source)), path, _size(path)) for path in texts]
    return Listing(documents, len(files) - len(texts), tuple(sorted(unread)))


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 where it is gone, which reading it will tell."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _files(source: Path) -> tuple[list[Path], list[Path]]:
    """Return all files below a folder, through links too, and what cannot be looked into.

    A folder that several ways lead to is searched once. Raises OSError for the folder itself.
    """
    files, unread = list[Path](), list[Path]()
    places = set[tuple[int, int]]()
    folders, links = [source], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        try:
            found = folder.stat()
            if (found.st_dev, found.st_ino) in places:
                continue
            places.add((found.st_dev, found.st_ino))
            inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            if folder == source:
                raise
            unread.append(folder)
            continue
        for entry in inside:
            path = folder / entry.name
            try:
                if entry.is_file():
                    files.append(path)
                elif entry.is_dir():
                    (links if entry.is_symlink() else folders).append(path)
                elif entry.is_symlink() and not path.exists():
                    unread.append(path)
            except OSError:  # a link that leads back to itself
                unread.append(path)
    return files, unread


def _check_unique_ids(source: Path, documents: Sequence[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise TierForceError(
                f"--input {source}: the id {document.id!r} appears more than once; ids tell records"
                " apart."
            )
        seen.add(document.id)


def _lines(source: Path) -> list[Document]:
    lines = list[tuple[int, str | None, int, int]]()
    with open_regular(source) as file:
        for number, (offset, raw) in enumerate(bounded_lines(file, MAX_BYTES), 1):
            if raw.strip():
                name = _identity(raw) if len(raw) <= MAX_BYTES else None
                lines.append((number, name, len(raw), offset))
            _check_count(source, len(lines))
    given = {name for _, name, _, _ in lines if name is not None}
    documents = []
    for number, name, size, offset in lines:
        if name is None:
            name = f"line {number}"
            while name in given:  # a document's own
                name += " (no id)"
        documents.append(Document(name, source, size, offset))
    return documents


def _check_count(source: Path, documents: int) -> None:
    if documents > MAX_DOCUMENTS:
        raise TierForceError(
            f"--input {source} has more than {MAX_DOCUMENTS:,} documents: split it into parts."
        )


def _identity(raw: bytes) -> str | None:
    """Return the id of a line; None when it has none, of which its record will then tell."""
    try:
        return str(_object(raw.decode("utf-8-sig"))["id"])
    except (InvalidRequestError, UnicodeDecodeError):
        return None


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not JSON: {error}.") from error
    id = value.get("id") if isinstance(value, dict) else None
    is_id = isinstance(id, str | int) and not isinstance(id, bool)
    if not is_id or not 0 < len(str(id)) <= _MAX_ID:
        raise InvalidRequestError(
            'the line must be an object with "id", a string that is not empty, of at most '
            f"{_MAX_ID:,} characters, or a whole number."
        )
    return value


def _text(line: str, name: str) -> str:
    """Return the text of a line. Raises InvalidRequestError, also where it is now another document's."""
    value = _object(line)
    if str(value["id"]) != name:
        raise InvalidRequestError(
            "the file has changed since it was listed: another document is in this one's place."
        )
    text = value.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError('the line must have "text", a string.')
    check_whole_characters(text)
    return text
