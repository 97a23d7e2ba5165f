"""Kinds of files: which are documents, by suffix and by their first bytes, and what to do with the
others.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from offload.errors import InvalidRequestError

TEXT = "text"
SUBTITLES = "subtitles"
PDF = "pdf"
# EPUB, DOCX, PPTX and ODT: archives, which are distinguished by their members
PACKAGE = "package"
ARCHIVE = "archive"  # a .zip of documents
HTML = "html"
NOTEBOOK = "ipynb"
TEXTUAL = (TEXT, SUBTITLES)  # need no parser if they are Unicode
_KINDS = {
    TEXT: (".txt", ".md", ".markdown", ".rst", ".csv", ".tsv", ".log"),
    SUBTITLES: (".srt", ".vtt"),
    HTML: (".html", ".htm", ".xhtml"),
    PDF: (".pdf",),
    PACKAGE: (".epub", ".docx", ".pptx", ".odt"),
    NOTEBOOK: (".ipynb",),
    ARCHIVE: (".zip",),
}
_BY_SUFFIX = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes}
SUFFIXES = tuple(_BY_SUFFIX)
# advice for documents of kinds that are not read
_ADVICE = {
    (".doc", ".rtf", ".pages", ".wpd"): "save it as .docx",
    (".ppt", ".key", ".odp"): "save it as .pptx",
    (".xls", ".xlsx", ".ods", ".numbers"): "save it as .csv",
    (
        ".mobi",
        ".azw",
        ".azw3",
        ".fb2",
        ".lit",
        ".djvu",
    ): "convert it to .epub, as with Calibre",
    (".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"): "unpack it, or make a .zip of it",
    (".jsonl",): "`summarize` reads it as --input on its own",
}
_ADVICE_BY_SUFFIX = {suffix: advice for suffixes, advice in _ADVICE.items() for suffix in suffixes}
MAGIC_BYTES = 8
_MAGIC = {b"%PDF-": PDF, b"PK\x03\x04": PACKAGE, b"PK\x05\x06": PACKAGE}
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


def kind_by_name(name: str) -> str | None:
    """Return the kind of a document by its suffix; None if files named so are not documents."""
    return _BY_SUFFIX.get(PurePosixPath(name).suffix.lower())


def kind_by_content(first_bytes: bytes, kind: str) -> str:
    """Return the kind that a file's first MAGIC_BYTES show; by default `kind`.

    Raises InvalidRequestError for a .doc, .ppt or .xls, and for an Office file with a password.
    """
    if first_bytes.startswith(_OLD_OFFICE):
        raise InvalidRequestError(
            "it is an old Office file, or one with a password: save it as .docx or .pptx, without "
            "a password."
        )
    return next((known for magic, known in _MAGIC.items() if first_bytes.startswith(magic)), kind)


def advice(name: str) -> str | None:
    """Return what to do with a document whose format is not read; None for other files."""
    suffix = PurePosixPath(name).suffix.lower()
    words = _ADVICE_BY_SUFFIX.get(suffix)
    return f"{suffix} is not read: {words}" if words is not None else None
