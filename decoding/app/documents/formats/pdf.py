"""Text of PDFs, through PDFium."""

from __future__ import annotations

from typing import Any, BinaryIO

from decoding.app.documents.formats.encodings import check_size
from offload.errors import InvalidRequestError

_LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0: None}
_MIN_TEXTLESS = 0.1  # share of pages from which there is a note; a few empty ones are usual


def read_pdf(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    """Return the text of the pages, line by line; words cut at the end of a line are joined.

    Raises InvalidRequestError if it is encrypted, damaged, or has no text.
    """
    pages = list[str]()
    size, unreadable = 0, 0
    with _open(file) as document:
        for index in range(len(document)):
            text = _page_text(document, index)
            unreadable += text is None
            pages.append(text or "")
            size += len(pages[-1])
            check_size(size)
    count, textless = len(pages), pages.count("") - unreadable
    if not any(pages):
        state = f"{unreadable} of them are damaged" if unreadable else "they are probably scanned"
        raise InvalidRequestError(
            f"none of its {count} pages has text; {state}. Recognise the text of scanned pages "
            "first: ocrmypdf in.pdf out.pdf."
        )
    source: dict[str, Any] = {"format": "pdf", "pages": count, "pages_without_text": textless}
    notes = []
    if unreadable:
        notes.append(f"damaged pages, which were not read: {unreadable} of {count}")
    if textless >= _MIN_TEXTLESS * count:
        notes.append(f"pages without text, perhaps scanned: {textless} of {count}")
    if notes:
        source["note"] = "; ".join(notes)
    return "\n\n".join(filter(None, pages)), source


def _open(file: BinaryIO) -> Any:
    from pypdfium2 import PdfDocument, PdfiumError

    try:
        return PdfDocument(file)
    except PdfiumError as error:
        reason = str(error).rstrip(".")
    if any(word in reason.lower() for word in ("password", "security")):
        raise InvalidRequestError(
            "the PDF is encrypted: save a copy without a password, as with qpdf --decrypt."
        )
    if "success" in reason.lower():
        raise InvalidRequestError("the PDF has no pages.")
    raise InvalidRequestError(
        f"it is not a PDF, or a damaged one ({reason}). Was its download interrupted?"
    )


def _page_text(document: Any, index: int) -> str | None:
    """Return the text of a page; None if it is damaged.

    PDFium marks hyphens at the end of a line as U+FFFE or U+0002.
    """
    from pypdfium2 import PdfiumError

    try:
        page = document[index]
        text: str = page.get_textpage().get_text_range()
        page.close()
    except PdfiumError:
        return None
    text = text.replace("\r\n", "\n").replace("\ufffe\n", "").replace("\x02\n", "")
    return text.replace("\ufffe", "").replace("\x02", "").translate(_LIGATURES).strip()
