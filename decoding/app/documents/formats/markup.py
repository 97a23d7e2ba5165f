"""HTML as Markdown."""

from __future__ import annotations

import codecs
import re
from typing import Any

from decoding.app.documents.formats.encodings import decode_legacy, decode_unicode
from offload.errors import InvalidRequestError

# options of markdownify: a model needs no escapes
_OPTIONS: dict[str, Any] = {"escape_asterisks": False, "escape_underscores": False}
_OPTIONS |= {"heading_style": "ATX", "strip": ["a"], "table_infer_header": True}
# encodings that pages declare, and what browsers take them for (WHATWG, Encoding, section 4.2)
_SUPERSETS = {"iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030"}
_SUPERSETS |= {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "iso8859-11": "cp874"}
_SUPERSETS |= {"utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8"}
_NOT_TEXT = ("script", "style", "template", "noscript", "title")
_BLANK_LINES = re.compile(r"\n\s*\n\s*\n")


def decode_html(raw: bytes) -> tuple[str, dict[str, str]]:
    """Return the source of a page, and the `encoding` and `note` of its record.

    The encoding that the page declares counts, read as browsers do, else what its bytes tell.
    Raises InvalidRequestError if it is binary, or of an unknown encoding.
    """
    from bs4.dammit import EncodingDetector

    if (decoded := decode_unicode(raw)) is not None:
        return decoded[0], {"encoding": decoded[1]}
    declared = EncodingDetector.find_declared_encoding(raw, is_html=True) or ""
    try:
        encoding = codecs.lookup(declared).name
    except LookupError:
        return decode_legacy(raw)
    encoding = _SUPERSETS.get(encoding, encoding)
    text = raw.decode(encoding, errors="replace")
    fields = {"encoding": encoding}
    if damaged := text.count("\ufffd"):
        fields["note"] = f"damaged characters: {damaged}"
    return text, fields


def markdown(source: str) -> tuple[str, str]:
    """Return the text of a page as Markdown, without the addresses of links and pictures, and its
    title; empty if it has none.

    Raises InvalidRequestError if it is binary.
    """
    from bs4 import BeautifulSoup, CData
    from bs4.element import PreformattedString
    from markdownify import MarkdownConverter

    if "\0" in source:
        raise InvalidRequestError("the document has NUL characters: it is binary, not text.")
    soup = BeautifulSoup(source, "html.parser")
    head = soup.head.title if soup.head is not None else None
    title = " ".join(head.get_text().split()) if head is not None else ""
    for tag in soup(_NOT_TEXT):
        tag.decompose()
    for image in soup("img"):
        image.replace_with(str(image.get("alt") or ""))
    for exponent in soup("sup"):
        exponent.insert(0, "^")
    for node in soup.find_all(string=lambda text: isinstance(text, PreformattedString)):
        if not isinstance(node, CData):  # a comment, or a declaration
            node.extract()
    text: str = MarkdownConverter(**_OPTIONS).convert_soup(soup)
    return _BLANK_LINES.sub("\n\n", text).strip(), title
