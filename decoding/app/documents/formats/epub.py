"""Text of EPUBs (EPUB 3.3, sections 4 and 5), chapter by chapter."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from decoding.app.documents.formats.archives import Archive, parse_xml
from decoding.app.documents.formats.encodings import check_size
from decoding.app.documents.formats.markup import decode_html, markdown
from offload.errors import InvalidRequestError

CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_NOT_TEXT = ("image/", "audio/", "video/")
_SVG = "image/svg+xml"
# encryption of fonts alone, which a book without DRM may have
_FONT_ALGORITHMS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


def read_epub(archive: Archive) -> tuple[str, dict[str, Any]]:
    """Return title, authors and the chapters in reading order, each once.

    Raises InvalidRequestError if chapters are encrypted, or none is in the file.
    """
    root = parse_xml(archive.read(CONTAINER), CONTAINER).find(".//{*}rootfile")
    if root is None:
        raise InvalidRequestError(f"the EPUB names no package document in {CONTAINER}.")
    package_name = _member(archive, "", root.get("full-path", ""))
    package = parse_xml(archive.read(package_name), package_name)
    names = list(dict.fromkeys(_chapters(archive, package, posixpath.dirname(package_name))))
    if protected := _encrypted_members(archive).intersection(names):
        raise InvalidRequestError(
            f"the EPUB is protected; encrypted chapters: {len(protected)} of {len(names)}."
        )
    parts = [" ".join("".join(each.itertext()).split()) for each in _title_and_authors(package)]
    found = [name for name in names if name in archive.names]
    if not found:
        raise InvalidRequestError(f"the EPUB has none of the {len(names)} chapters that it lists.")
    source: dict[str, Any] = {"format": "epub", "chapters": len(found)}
    notes = []
    if missing := len(names) - len(found):
        notes.append(f"chapters missing in the file: {missing} of {len(names)}")
    size = 0
    for name in found:
        text, fields = decode_html(archive.read(name))
        notes += [f"{name}: {fields['note']}"] if "note" in fields else []
        parts.append(markdown(text)[0])
        size += len(parts[-1])
        check_size(size)
    if notes:
        source["note"] = "; ".join(notes)
    return "\n\n".join(filter(None, parts)), source


def _chapters(archive: Archive, package: Any, folder: str) -> Iterator[str]:
    """Yield the names of the members with text, in the order of the spine."""
    items = {item.get("id"): item for item in package.findall(".//{*}item")}
    for each in package.findall(".//{*}itemref"):
        item = items.get(each.get("idref"))
        if item is None:
            yield str(each.get("idref"))
        elif not (kind := item.get("media-type", "").lower()).startswith(_NOT_TEXT) or (
            kind.startswith(_SVG)
        ):
            yield _member(archive, folder, item.get("href", ""))


def _member(archive: Archive, folder: str, reference: str) -> str:
    """Return the member that a reference names, which may be percent-encoded."""
    path = reference.partition("#")[0]
    names = [
        posixpath.normpath(posixpath.join("/", folder, each)).lstrip("/")
        for each in (unquote(path), path)
    ]
    return next((name for name in names if name in archive.names), names[0])


def _title_and_authors(package: Any) -> Iterator[Any]:
    for tag in ("title", "creator"):
        yield from package.iter(f"{{http://purl.org/dc/elements/1.1/}}{tag}")


def _encrypted_members(archive: Archive) -> set[str]:
    """Return the names of the encrypted members, fonts left out."""
    encrypted = set[str]()
    if _ENCRYPTION in archive.names:
        for data in parse_xml(archive.read(_ENCRYPTION), _ENCRYPTION).findall(
            ".//{*}EncryptedData"
        ):
            method, reference = data.find("{*}EncryptionMethod"), data.find(".//{*}CipherReference")
            algorithm = method.get("Algorithm", "") if method is not None else ""
            if reference is not None and algorithm not in _FONT_ALGORITHMS:
                encrypted.add(_member(archive, "", reference.get("URI", "")))
    return encrypted
