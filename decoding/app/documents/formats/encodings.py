"""Bytes to text: UTF-8, encodings that a byte order mark or NUL bytes tell of, and others where
they are certain.
"""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from typing import Any

from offload.errors import InvalidRequestError

MAX_BYTES = 32 << 20  # per document or line: some 8 million tokens, more than any context
_MARKS = {  # UTF-32 first: its little-endian mark begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
# designates Japanese or Korean letters in ISO-2022, whose bytes are all ASCII
_ISO_2022 = re.compile(rb"\x1b\$(?:[@B]|\([@BCD]|\)C)")
_CONTROLS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f]")
# A guess is certain if no other one is as good: `charset_normalizer` scores each from 0 (clean) to
# 1 by its disorder, and from 0 to 1 by how often the letters of its language occur together.
_MAX_DISORDER = 0.1
_EQUAL_DISORDER = 0.02
_EQUAL_COHERENCE = 0.1
_MIN_LETTERS = 32  # bytes beyond ASCII; fewer look like anything
# encodings that old files have; those of MS-DOS and the Macintosh fit whatever they are not, too
_USUAL = {"cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "koi8_r"}
_USUAL |= {f"iso8859_{number}" for number in (1, 2, 5, 7, 8, 9, 15)}
_USUAL |= {"big5", "big5hkscs", "cp932", "cp949", "euc_jis_2004", "euc_jp", "euc_kr", "gb18030"}
_USUAL |= {"shift_jis", "shift_jis_2004", "gbk", "gb2312"}
# In Windows-1252 these are symbols or capitals within a word: it is in another encoding, which has
# letters there.
_NOT_1252 = re.compile(
    r"[a-zA-Z][\u2020\u2021\u02c6\u2030\u0192\xa2-\xa9\xac\xae-\xb9\xbc-\xbe\xc0-\xd8\xdd\xde\xf7]+[a-z]"
    r"|[\xa4\xa6\xa8\xb4\xb8\xbc-\xbe][a-z]"
)
_WESTERN = {"Danish", "Dutch", "English", "Finnish", "French", "German", "Italian", "Norwegian"}
_WESTERN |= {"Portuguese", "Spanish", "Swedish"}


def check_size(size: int) -> None:
    """Raise InvalidRequestError if a document's text has more than MAX_BYTES."""
    if size > MAX_BYTES:
        raise InvalidRequestError(
            f"the document is larger than {MAX_BYTES >> 20} MiB, more than any context holds: "
            "split it into parts."
        )


def decode_unicode(raw: bytes) -> tuple[str, str] | None:
    """Return a text and its encoding if that is Unicode; None if it is another one.

    Raises InvalidRequestError for more than MAX_BYTES, and for binary content.
    """
    check_size(len(raw))
    encoding = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), None)
    encoding = encoding or _utf16_by_nuls(raw)
    if encoding is None and raw.isascii() and _ISO_2022.search(raw):
        return None
    try:
        text = raw.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        if encoding is None and b"\0" not in raw:
            return None
        raise InvalidRequestError(
            f"the document is binary, or damaged: it is not {(encoding or 'utf-8').upper()} at "
            f"byte {error.start}. Save it as UTF-8 text."
        ) from error
    if "\0" in text:
        raise InvalidRequestError(
            "the document has NUL characters: it is binary, not text. Save it as UTF-8 text."
        )
    return text, (encoding or "utf-8").removesuffix("-sig")


def _utf16_by_nuls(raw: bytes) -> str | None:
    """Return the byte order of UTF-16 without a mark, if half of most characters is a NUL byte.

    It is None for text that is not mostly ASCII, too, which looks like binary content.
    """
    odd, even = raw[1::2].count(0), raw[::2].count(0)
    if raw and len(raw) % 2 == 0 and max(odd, even) > len(raw) // 4 and min(odd, even) == 0:
        encoding = "utf-16-le" if odd else "utf-16-be"
        text = raw.decode(encoding, errors="replace")
        if not _CONTROLS.search(text) and "\ufffd" not in text:
            return encoding
    return None


def unknown_encoding(raw: bytes, reason: str) -> InvalidRequestError:
    """Return the error for text that is not UTF-8, with the recipe that mends it."""
    try:
        raw.decode()
        where = ""
    except UnicodeDecodeError as error:
        where = f": byte {error.start} is {raw[error.start]:#04x}"
    return InvalidRequestError(
        f"the document is not UTF-8{where}; {reason}. Convert it first; for Latin-1: "
        "iconv -f latin1 -t utf-8."
    )


def decode_legacy(raw: bytes) -> tuple[str, dict[str, str]]:
    """Return a text that is not Unicode, and its `encoding` with a `note`, where that is certain.

    It is certain if every encoding that fits as well gives the same text. If Windows-1252 is one of
    several, and the language is one of Western Europe by all of them, it is Windows-1252, as
    browsers assume. Raises InvalidRequestError otherwise, ImportError without charset-normalizer.
    """
    from charset_normalizer import from_bytes

    if raw.isascii():
        for encoding in ("iso2022_kr", "iso2022_jp_2"):
            with suppress(UnicodeDecodeError):
                return raw.decode(encoding), {"encoding": encoding}
        return raw.decode(), {"encoding": "utf-8"}
    matches = list(from_bytes(raw))
    if not matches or matches[0].chaos > _MAX_DISORDER:
        raise unknown_encoding(raw, "no encoding fits, so it may be binary")
    best = matches[0]
    equal = [
        match
        for match in matches
        if match.chaos <= best.chaos + _EQUAL_DISORDER
        and match.coherence >= best.coherence - _EQUAL_COHERENCE
    ]
    letters = sum(byte > 127 for byte in raw[: 1 << 16])
    if len({str(match) for match in equal}) == 1:
        usual = _USUAL.intersection((best.encoding, *best.could_be_from_charset))
        if best.language in _WESTERN:
            usual &= {"cp1252"}
        if usual and letters >= _MIN_LETTERS:
            return _recognised(best, best.encoding if best.encoding in usual else min(usual))
    is_western = all(match.language in _WESTERN for match in equal)
    for match in equal:
        is_1252 = "cp1252" in (match.encoding, *match.could_be_from_charset)
        is_clean = is_1252 and not _NOT_1252.search(str(match))
        if is_western and is_clean and match.chaos <= best.chaos:
            return _recognised(match, "cp1252")
    names = " or ".join(match.encoding for match in equal[:3])
    raise unknown_encoding(raw, f"it may be {names}, which is not certain")


def _recognised(match: Any, encoding: str) -> tuple[str, dict[str, str]]:
    note = f"read as {encoding}, by its letters; if some are wrong, convert it"
    return str(match), {"encoding": encoding, "note": note}
