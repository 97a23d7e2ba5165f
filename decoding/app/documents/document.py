"""A document: where it is, and how its text is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from decoding.app.documents.conversion import convert
from decoding.app.documents.formats import kinds
from decoding.app.documents.formats.encodings import MAX_BYTES, decode_unicode, unknown_encoding
from decoding.app.documents.formats.readers import read_unicode
from decoding.app.documents.json_lines import read_line
from decoding.text.encoding import check_whole_characters
from decoding.text.instructions import Instructions
from offload.errors import InvalidRequestError
from offload.regular_files import MIB, UnsuitableFileError, open_regular

_MAX_FILE_BYTES = 2 << 30  # with pictures


@dataclass(frozen=True)
class Identity:
    """A digest of a document, and the instructions of its own that it may have.

    The digest is the SHA-256 of the file, of a line's text, or of a member's checksum.
    """

    digest: str
    instructions: Instructions | None = None


@dataclass(frozen=True)
class DocumentText:
    """The text of a document, what its record says of where it is from, and its `Identity`.

    `source` has its format; where they apply, its encoding, its number of pages or chapters, and a
    note on what is missing.
    """

    text: str
    source: dict[str, Any]
    identity: Identity

    @property
    def warning(self) -> str | None:
        """What the user should know about the text; None if there is nothing."""
        note: str | None = self.source.get("note")
        return note


@dataclass(frozen=True)
class Document:
    """The location of a document, which is read only when it is processed."""

    id: str
    path: Path
    size: int = 0  # bytes
    offset: int | None = None  # byte offset of its line in a JSONL file
    member: int | None = None  # its index in an archive
    checksum: int = 0  # CRC-32 of a member
    kind: str | None = None  # None: by the file's name
    problem: str | None = None  # why it cannot be read, if that is known

    @property
    def is_text(self) -> bool:
        """Whether its size is that of its text."""
        return self.offset is not None or self.named_kind == kinds.TEXT

    @property
    def named_kind(self) -> str:
        """Its kind by its name."""
        return self.kind or kinds.kind_by_name(self.path.name) or kinds.TEXT

    def read(self) -> DocumentText:
        """Return the text.

        Raises InvalidRequestError if it is empty, binary, of an unknown encoding, damaged, too
        large, or gone.
        """
        with self._opened() as file:
            return self.read_from(file)

    def read_from(self, file: BinaryIO) -> DocumentText:
        """Return the text, from a regular file that is open; the path is only a name then.

        Raises InvalidRequestError as `read` does.
        """
        if self.offset is not None:
            text, identity = self._line(file)
            source: dict[str, Any] = {"format": "jsonl"}
        else:
            # before the text, which may change in between
            identity = Identity(self._digest(file))
            file.seek(0)
            text, source = self._read(file)
            check_whole_characters(text)
        if not text.strip():
            note = f" ({source['note']})" if "note" in source else ""
            raise InvalidRequestError(f"the document is empty{note}.")
        return DocumentText(text, source, identity)

    def identify(self) -> Identity:
        """Return the identity alone, in far less time than a conversion takes.

        Raises InvalidRequestError as `read` does.
        """
        with self._opened() as file:
            if self.offset is not None:
                return self._line(file)[1]
            return Identity(self._digest(file))

    def _digest(self, file: BinaryIO) -> str:
        if self.member is not None:
            return _sha256(f"{self.size} {self.checksum}")
        if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
            raise InvalidRequestError(
                f"the document is larger than {_MAX_FILE_BYTES >> 30} GiB, more than any context "
                "holds: split it into parts."
            )
        digest = hashlib.sha256()
        while block := file.read(MIB):
            digest.update(block)
        return digest.hexdigest()

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """Open the file for a `with` block. Raises InvalidRequestError if that fails."""
        if self.problem is not None:
            raise InvalidRequestError(self.problem)
        try:
            with open_regular(self.path) as file:
                yield file
        except UnsuitableFileError as error:
            raise InvalidRequestError(
                f"{self.path} is not a regular file: save its text to one first."
            ) from error
        except OSError as error:
            raise InvalidRequestError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _line(self, file: BinaryIO) -> tuple[str, Identity]:
        file.seek(self.offset or 0)
        text, instructions = read_line(file.readline(MAX_BYTES + 1), self.id)
        check_whole_characters(text)
        return text, Identity(_sha256(text), instructions)

    def _read(self, file: BinaryIO) -> tuple[str, dict[str, Any]]:
        kind = self.named_kind
        if self.member is not None:
            return convert(file, kind, (self.member, self.size, self.checksum))
        if kind == kinds.ARCHIVE:
            raise InvalidRequestError(
                "it is an archive of documents: unpack it, and name one of them."
            )
        kind = kinds.kind_by_content(file.read(kinds.MAGIC_BYTES) or b"", kind)
        if kind == kinds.TEXT and (advice := kinds.advice(self.path.name)) is not None:
            raise InvalidRequestError(f"{advice}.")
        if kind in kinds.TEXTUAL:
            file.seek(0)
            # None for a file in /proc that would block
            if (reading := read_unicode(file.read(MAX_BYTES + 1) or b"", kind)) is not None:
                return reading
        return convert(file, kind)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def decode_input(raw: bytes) -> str:
    """Return the text of standard input.

    Raises InvalidRequestError if it is not Unicode text, or more than MAX_BYTES.
    """
    if kinds.kind_by_content(raw, kinds.TEXT) != kinds.TEXT:
        raise InvalidRequestError("standard input is not text: name the file itself instead.")
    if (decoded := decode_unicode(raw)) is None:
        raise unknown_encoding(raw, "standard input must be")
    return decoded[0]
