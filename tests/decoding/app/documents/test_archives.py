"""Archives of documents: each member is a document, and harmful ones are errors of their own."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest

from decoding.app.documents.document import Document
from decoding.app.documents.formats import archives
from decoding.app.documents.formats.archives import Archive
from decoding.app.documents.listing import Listing, find_documents
from offload.errors import InvalidRequestError, TierForceError
from support.document_files import archive, epub, pdf

pytest.importorskip("mammoth")
pytest.importorskip("pypdfium2")


def results_of(listing: Listing) -> dict[str, str]:
    results = {}
    for document in listing.documents:
        try:
            results[document.id] = document.read().text
        except InvalidRequestError as error:
            results[document.id] = f"error: {error}"
    return results


def harmful() -> bytes:
    buffer = io.BytesIO(archive({"a.txt": "first", "b/c.md": "second", "a.txt (2)": "third"}))
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("../../out.txt", "x")
        file.writestr("/etc/passwd.txt", "x")
        for name in ("link.txt", "a.txt"):
            link = zipfile.ZipInfo(name)
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(link, "other")
        file.writestr("a.txt", "another")
        file.writestr("./d.txt", "fourth")
        file.writestr("pdf.txt", pdf([["page"]]))
        file.writestr("b.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
        file.writestr("big.txt", bytes(40 << 20))
        file.writestr("nested.zip", b"PK")
        file.writestr("picture.png", b"x")
        file.writestr("__MACOSX/._a.txt", b"x")
        file.writestr(".DS_Store", b"x")
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_are_documents_and_harmful_ones_are_errors(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/books.zip").write_bytes(harmful())
    (tmp_path / "in/z.txt").write_text("outside")
    (tmp_path / "in/broken.zip").write_bytes(b"PK\x03\x04broken")
    listing = find_documents(tmp_path / "in", include=["*.txt*", "*.md", "*.docx"])
    results = results_of(listing)
    assert results == {
        "books.zip/../../out.txt": "error: its name leads out of the archive.",
        "books.zip//etc/passwd.txt": "error: its name leads out of the archive.",
        "books.zip/./d.txt": "fourth",
        "books.zip/a.txt": "first",
        "books.zip/a.txt (2)": "third",
        "books.zip/a.txt (3)": "error: it is a symbolic link in the archive.",
        "books.zip/a.txt (4)": "another",
        "books.zip/b.docx": "error: it is an old Office file, or one with a password: save it as "
        ".docx or .pptx, without a password.",
        "books.zip/b/c.md": "second",
        "books.zip/big.txt": "error: the document is larger than 32 MiB, more than any context "
        "holds: split it into parts.",
        "books.zip/pdf.txt": "page",
        "books.zip/link.txt": "error: it is a symbolic link in the archive.",
        "broken.zip": "error: it may be damaged (BadZipFile: File is not a zip file).",
        "z.txt": "outside",
    }
    assert listing.skipped == {
        "hidden": ["books.zip/.DS_Store", "books.zip/__MACOSX/._a.txt"],
        "an archive in an archive: unpack it": ["books.zip/nested.zip"],
        "left out by --include": ["books.zip/picture.png"],
    }
    assert not (tmp_path / "out.txt").exists()


def test_archive_is_a_source_itself(tmp_path: Path) -> None:
    path = tmp_path / "books.zip"
    path.write_bytes(archive({"a.pdf": pdf([["page"]]), "b.epub": epub({"a.xhtml": "x"}), "c": ""}))
    listing = find_documents(path)
    assert [document.id for document in listing.documents] == ["a.pdf", "b.epub"]
    assert results_of(listing) == {"a.pdf": "page", "b.epub": "The Title\n\nAn Author\n\nx"}
    assert find_documents(path, include=["c"]).documents[0].id == "c"
    with pytest.raises(InvalidRequestError, match="archive of documents: unpack it"):
        Document("books.zip", path).read()
    path.write_bytes(b"#!/bin/sh\n" + path.read_bytes())  # it unpacks itself
    with pytest.raises(InvalidRequestError, match="archive of documents: unpack it"):
        Document("books.zip", path).read()
    path.write_bytes(b"PK")
    with pytest.raises(TierForceError, match=r"books\.zip: it may be damaged"):
        find_documents(path)


def test_encrypted_member_is_an_error(tmp_path: Path) -> None:
    content = bytearray(archive({"a.txt": "x"}))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # flags of both headers
        content[content.index(magic) + offset] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    results = results_of(find_documents(tmp_path / "a.zip"))
    assert "encrypted: unpack the archive with its password" in results["a.txt"]


def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive({"a.txt": "xyz", "b.txt": ""})
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 2)
    with pytest.raises(InvalidRequestError, match=r"a\.txt in the archive is larger"):
        Archive(io.BytesIO(content)).read("a.txt")
    with pytest.raises(InvalidRequestError, match="c is missing"):
        Archive(io.BytesIO(content)).read("c")
    for changed in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        with pytest.raises(InvalidRequestError, match="has changed since"):
            Archive(io.BytesIO(content)).open(*changed)
    assert Archive(io.BytesIO(content)).open(1, 0, 0).read() == b""
    monkeypatch.setattr(archives, "MAX_MEMBERS", 1)
    with pytest.raises(InvalidRequestError, match="more than 1 members"):
        Archive(io.BytesIO(content))
