"""Finding and reading what is to be summarised: a folder of text, one file, or JSON lines with `id`
and `text`.
"""

from __future__ import annotations

import json
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
        """The text. Raises DocumentError when it is empty, binary, not UTF-8, or not there any
        more.
        """
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


def find_documents(source: Path) -> list[Document]:
    """All documents of a folder (searched through, by name), a text file, or a .jsonl file, in
    order.

    Raises TierForceError when there is none, when the source cannot be read, or when two share an
    id.
    """
    try:
        if source.is_dir():
            paths = sorted(
                path
                for path in source.rglob("*")
                if path.suffix.lower() in SUFFIXES and path.is_file()
            )
            found = [
                Document(str(path.relative_to(source)), path, path.stat().st_size) for path in paths
            ]
        elif source.suffix.lower() == ".jsonl":
            found = _lines(source)
        else:
            with source.open("rb"):
                found = [Document(source.name, source, source.stat().st_size)]
    except OSError as error:
        raise TierForceError(f"--input {source} cannot be read: {error.strerror}.") from error
    if not found:
        what = f"no {' or '.join(SUFFIXES)} file" if source.is_dir() else "no line"
        raise TierForceError(f"--input {source} holds {what}: there is nothing to summarise.")
    seen: set[str] = set()
    for document in found:
        if document.id in seen:
            raise TierForceError(
                f"--input {source}: the id {document.id!r} appears more than once; ids tell records"
                " apart."
            )
        seen.add(document.id)
    return found


def _lines(source: Path) -> list[Document]:
    found, offset = [], 0
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                found.append(Document(_identity(raw) or f"line {number}", source, len(raw), offset))
            offset += len(raw)
    return found


def _identity(raw: bytes) -> str | None:
    """The id of a line; None when it has none, of which its record will then tell."""
    try:
        return str(_object(raw.decode("utf-8-sig"))["id"])
    except (DocumentError, UnicodeDecodeError):
        return None


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"the line is not JSON: {error}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("id"), str | int):
        raise DocumentError('the line must be an object with "id", a string or a whole number.')
    return found


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
