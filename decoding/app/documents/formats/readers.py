"""A document of any kind as text: the only function that the child process calls."""

from __future__ import annotations

import json
import re
from typing import Any, BinaryIO

from decoding.app.documents.formats import kinds
from decoding.app.documents.formats.archives import Archive, parse_xml
from decoding.app.documents.formats.encodings import (
    MAX_BYTES,
    decode_legacy,
    decode_unicode,
    unknown_encoding,
)
from decoding.app.documents.formats.epub import CONTAINER, read_epub
from decoding.app.documents.formats.markup import decode_html, markdown
from decoding.app.documents.formats.office import read_docx, read_odt, read_pptx
from decoding.app.documents.formats.pdf import read_pdf
from decoding.app.documents.formats.subtitles import spoken_text
from offload.errors import InvalidRequestError

# the main part; Word for the web numbers it
_WORD = re.compile(r"word/document\d*\.xml")
_POWERPOINT = re.compile(r"ppt/presentation\d*\.xml")
Reading = tuple[str, dict[str, Any]]  # the text, and what a record says of its source


def read(file: BinaryIO, kind: str) -> Reading:
    """Return the text of a document, by its content and, for formats that are text, by its kind.

    Raises InvalidRequestError if it cannot be read, ImportError if a library is not installed, and
    whatever a library raises for damaged files.
    """
    if kind == kinds.ARCHIVE:
        return json.dumps(list(Archive(file).members())), {}
    kind = kinds.kind_by_content(file.read(kinds.MAGIC_BYTES) or b"", kind)
    file.seek(0)
    if kind == kinds.PDF:
        return read_pdf(file)
    if kind == kinds.PACKAGE:
        return _read_package(file)
    raw = file.read(MAX_BYTES + 1) or b""
    if kind == kinds.HTML:
        source, fields = decode_html(raw)
        text, title = markdown(source)
        is_in_text = title in " ".join(text[: 2 * len(title) + 100].split())
        return text if is_in_text else f"{title}\n\n{text}", {"format": "html", **fields}
    if (reading := read_unicode(raw, kind)) is not None:
        return reading
    try:
        text, fields = decode_legacy(raw)
    except ImportError as error:
        reason = "pip install 'tierforce[documents]' to have other encodings recognised"
        raise unknown_encoding(raw, reason) from error
    return _read_text(text, kind, fields)


def read_unicode(raw: bytes, kind: str) -> Reading | None:
    """Return the text of a document whose format is text; None if it is not Unicode."""
    if (decoded := decode_unicode(raw)) is None:
        return None
    return _read_text(decoded[0], kind, {"encoding": decoded[1]})


def _read_text(text: str, kind: str, fields: dict[str, str]) -> Reading:
    source = {"format": kind, **fields}
    if kind == kinds.SUBTITLES:
        return spoken_text(text), source
    if kind == kinds.NOTEBOOK:
        return _cells(text), source
    return text, source


def _cells(text: str) -> str:
    """Return the cells of a Jupyter notebook, without outputs."""
    try:
        notebook = json.loads(text)
        metadata = notebook.get("metadata") or {}
        language = (metadata.get("kernelspec") or {}).get("language")
        language = language or (metadata.get("language_info") or {}).get("name") or "python"
        cells = [
            cell
            for sheet in (notebook, *notebook.get("worksheets", []))  # a list up to version 3
            for cell in sheet.get("cells", [])
        ]
        blocks = []
        for cell in cells:
            source = "".join(cell.get("source", cell.get("input", "")))
            is_code = source and cell.get("cell_type") == "code"
            blocks.append(f"```{language}\n{source}\n```" if is_code else source)
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidRequestError("it is not a Jupyter notebook, or a damaged one.") from error
    return "\n\n".join(filter(None, blocks))


def _read_package(file: BinaryIO) -> Reading:
    archive = Archive(file)
    if CONTAINER in archive.names:
        return read_epub(archive)
    if parts := sorted(filter(_WORD.fullmatch, archive.names)):
        for part in parts:  # the library would drop unsafe entities in silence
            parse_xml(archive.read(part), part)
        return read_docx(file)
    if any(map(_POWERPOINT.fullmatch, archive.names)):
        return read_pptx(file)
    if archive.names & {"content.xml", "encrypted-package"}:
        return read_odt(archive)
    raise InvalidRequestError(
        "it is a ZIP archive, but neither an EPUB nor a .docx, .pptx or .odt: unpack it, or name "
        "it .zip."
    )
