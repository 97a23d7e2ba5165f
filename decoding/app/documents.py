"""What is to be summarised: a folder of text, one file, or JSON lines with `id` and `text`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import DocumentError, TierForceError

SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class Document:
    """Where one document's text is; it is read only when its turn comes."""

    id: str
    path: Path
    size: int  # bytes
    offset: int | None = None  # of its line in a JSONL file

    def read(self) -> str:
        """Return the text.

        Raises DocumentError when it is empty, binary, not UTF-8, or not there any more.
        """
        if self.path.exists() and not self.path.is_file():
            raise DocumentError(f"{self.path} is no regular file: save its text to one first.")
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset or 0)
                raw = file.read() if self.offset is None else file.readline()
        except OSError as error:
            raise DocumentError(f"{self.path} cannot be read: {error.strerror}.") from error
        if b"\0" in raw:
            raise DocumentError(
                "the document is binary (it has NUL bytes); only text can be summarised."
            )
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"the document is not UTF-8: byte {error.start} is {raw[error.start]:#04x}. Convert"
                " it first."
            ) from error
        if self.offset is not None:
            text = _text(text)
        if not text.strip():
            raise DocumentError("the document is empty.")
        return text


@dataclass(frozen=True)
class Listing:
    """What a source holds."""

    documents: list[Document]
    skipped: int = 0  # files of a folder that are no text


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
        elif source.suffix.lower() == ".jsonl":
            listing = Listing(_lines(source))
        else:
            with source.open("rb"):
                listing = Listing([Document(source.name, source, source.stat().st_size)])
    except OSError as error:
        raise TierForceError(f"--input {source} cannot be read: {error.strerror}.") from error
    if not listing.documents:
        what = f"no {' or '.join(SUFFIXES)} file" if source.is_dir() else "no line"
        raise TierForceError(f"--input {source} holds {what}: there is nothing to summarise.")
    _refuse_twins(source, listing.documents)
    return listing


def _folder(source: Path, output: Path | None) -> Listing:
    ours = output.resolve() if output is not None else None
    files = [path for path in source.rglob("*") if path.is_file() and path.resolve() != ours]
    texts = sorted(path for path in files if path.suffix.lower() in SUFFIXES)
    documents = [
        Document(str(path.relative_to(source)), path, path.stat().st_size) for path in texts
    ]
    return Listing(documents, len(files) - len(texts))


def _refuse_twins(source: Path, documents: Sequence[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise TierForceError(
                f"--input {source}: the id {document.id!r} appears more than once; ids tell records"
                " apart."
            )
        seen.add(document.id)


def _lines(source: Path) -> list[Document]:
    documents, offset = [], 0
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                name = _identity(raw) or f"line {number}"
                documents.append(Document(name, source, len(raw), offset))
            offset += len(raw)
    return documents


def _identity(raw: bytes) -> str | None:
    """Return the id of a line; None when it has none, of which its record will then tell."""
    try:
        return str(_object(raw.decode("utf-8-sig"))["id"])
    except (DocumentError, UnicodeDecodeError):
        return None


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"the line is not JSON: {error}.") from error
    if not isinstance(value, dict) or not isinstance(value.get("id"), str | int):
        raise DocumentError('the line must be an object with "id", a string or a whole number.')
    return value


def _text(line: str) -> str:
    text = _object(line).get("text")
    if not isinstance(text, str):
        raise DocumentError('the line must have "text", a string.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"the text has half a character: a lone surrogate at index {error.start}."
        ) from error
    return text
