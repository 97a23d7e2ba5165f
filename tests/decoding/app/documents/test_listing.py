"""Which documents are found, their order and ids, and errors when they are read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from decoding.app.documents import document, json_lines, listing
from decoding.app.documents.document import Document
from decoding.app.documents.formats import encodings
from decoding.app.documents.listing import RESULT_MARK, find_documents
from offload.errors import InvalidRequestError, TierForceError
from support.document_files import archive
from support.irregular import IRREGULAR


def test_folder_is_searched_recursively_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.TXT", "B.md", "notes.odd", "a.txt.bak"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"This is {name}.")
    (tmp_path / "folder.txt").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "broken.txt")
    found = find_documents(tmp_path).documents
    assert [document.id for document in found] == ["B.md", "a/b/c.TXT", "a/z.md", "b.txt"]
    assert [document.read().text for document in found] == [
        f"This is {document.id}." for document in found
    ]


def test_single_file_with_any_name_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("Dear all,")
    (document,) = find_documents(path).documents
    assert (document.id, document.size, document.read().text) == ("letter", 9, "Dear all,")


def test_jsonl_lines_are_documents_with_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    contents = {
        "a": "First.",
        7: "Zwölf Boxkämpfer 🥊 jagen",
        "ü": "line\nbreak",
        "last": "no newline at the end",
    }
    lines = [
        json.dumps({"text": text, "id": name, "more": 1}, ensure_ascii=False)
        for name, text in contents.items()
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
    found = find_documents(path).documents
    assert [document.id for document in found] == ["a", "7", "ü", "last"]
    assert [document.read().text for document in found] == list(contents.values())
    assert found[2].size == len(lines[2].encode()) + 2


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffIt was".encode())
    assert find_documents(path).documents[0].read().text == "It was"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"abc\0def", "NUL"),
        (b"It was\xff\xfe\x90\x9d", r"byte 6 is 0xff; .*iconv -f latin1"),
        (b"\xff\xfeabc", "not UTF-16"),
        (bytes(range(256)), "binary"),
        ("Příliš žluťoučký kůň úpěl".encode("iso8859-2"), "it may be .*, which is not certain"),
    ],
)
def test_reading_non_text_raises(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (document,) = find_documents(tmp_path).documents
    with pytest.raises(InvalidRequestError, match=reason):
        document.read()


def test_reading_a_deleted_document_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"gone\.txt cannot be read: No such file"):
        Document("gone.txt", tmp_path / "gone.txt", 3).read()


@pytest.mark.parametrize(
    ("line", "name", "reason"),
    [
        ('{"id": "a", "text": "x"', "line 2", "not JSON"),
        ('{"id": "a"}', "a", '"text"'),
        ('{"id": "a", "text": null}', "a", '"text"'),
        ('{"id": "a", "text": "  "}', "a", "empty"),
        ('{"id": 1.5, "text": "x"}', "line 2", '"id"'),
        ('{"id": true, "text": "x"}', "line 2", '"id"'),
        ('{"id": "", "text": "x"}', "line 2", "non-empty"),
        ('{"id": "a", "text": "x\\u0000y", "b": "\0"}', "line 2", "NUL"),
        ('{"id": "a", "text": "\\udc00"}', "a", "surrogate"),
        ('"text"', "line 2", '"id"'),
    ],
)
def test_invalid_line_is_an_unreadable_document(
    line: str, name: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "good", "text": "x"}\n' + line + "\n", encoding="utf-8")
    good, bad = find_documents(path).documents
    assert (good.id, good.read().text) == ("good", "x")
    assert bad.id == name
    with pytest.raises(InvalidRequestError, match=reason):
        bad.read()


def test_line_that_is_not_utf8_is_an_unreadable_document(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": "caf\xe9", "text": "x"}\n')
    (document,) = find_documents(path).documents
    assert document.id == "line 1"
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        document.read()


def test_duplicate_ids_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"id": "a", "text": "x"}\n{"id": "b", "text": "x"}\n{"id": "a", "text": "y"}\n'
    )
    with pytest.raises(TierForceError, match="'a' appears more than once"):
        find_documents(path)


def test_source_without_documents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierForceError, match="nothing to summarise"):
        find_documents(tmp_path)
    with pytest.raises(TierForceError, match="No such file"):
        find_documents(tmp_path / "nowhere")


def test_other_files_are_named_and_output_is_left_out(tmp_path: Path) -> None:
    for name in (
        "a.txt",
        "b.mobi",
        "c.doc",
        "d.DOC",
        "Makefile",
        ".git",
        "x.jsonl",
        "out.txt",
        "out.txt.parts",
        "out/results.txt",
        "out/sub/results.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("It was")
    (tmp_path / "old.md").write_text(f"<!-- {RESULT_MARK} -->\n\n# a.txt\n")
    (tmp_path / "old.markdown").write_text(f"<!-- {RESULT_MARK} -->\n")
    (tmp_path / "old.TXT").write_text(f"{RESULT_MARK}\n")
    here = tmp_path / "../" / tmp_path.name
    found = find_documents(tmp_path, [here / "out.txt", here / "out"])
    assert [document.id for document in found.documents] == ["a.txt"]
    assert found.skipped == {
        "hidden": [".git"],
        "results of an earlier job": ["old.TXT", "old.markdown", "old.md"],
        "not a kind of document that is read": ["Makefile"],
        ".mobi is not read: convert it to .epub, as with Calibre": ["b.mobi"],
        ".doc is not read: save it as .docx": ["c.doc", "d.DOC"],
        ".jsonl is not read: `summarize` reads it as --input on its own": ["x.jsonl"],
    }


def test_included_patterns_replace_suffixes(tmp_path: Path) -> None:
    for name in ("main.py", "src/lib.py", "src/notes.txt", "docs/a.rst", "docs/b/c.rst", "x.c"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    found = find_documents(tmp_path, include=["*.py", "docs/*.rst"])
    assert [document.read().text for document in found.documents] == [
        "docs/a.rst",
        "docs/b/c.rst",
        "main.py",
        "src/lib.py",
    ]
    assert found.skipped == {"left out by --include": ["src/notes.txt", "x.c"]}
    with pytest.raises(TierForceError, match=r"nothing to summarise \(6: left out by --include\)"):
        find_documents(tmp_path, include=["*.java"])


def test_pipe_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(TierForceError, match="pipe or a device"):
        find_documents(tmp_path / "pipe.txt")
    with pytest.raises(InvalidRequestError, match="not a regular file"):
        Document("pipe.txt", tmp_path / "pipe.txt", 0).read()
    with pytest.raises(TierForceError, match="nothing to summarise"):
        find_documents(tmp_path)


def test_oversized_documents_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (document, encodings, json_lines):
        monkeypatch.setattr(module, "MAX_BYTES", 100)
    book, lines = tmp_path / "a.txt", tmp_path / "in.jsonl"
    book.write_text("x" * 100)
    assert len(Document("a.txt", book, 0).read().text) == 100
    os.truncate(book, 1 << 40)  # sparse: takes no disk space
    lines.write_text(
        f'{{"id": "a", "text": "first"}}\n{{"id": "b", "text": "{"x" * 1000}"}}\n'
        '{"id": "c", "text": "last"}\n' + " " * 200
    )
    found = find_documents(lines).documents
    assert [document.id for document in found] == ["a", "line 2", "c"]
    assert [found[0].read().text, found[2].read().text] == ["first", "last"]
    for large in (Document("a.txt", book, 0), found[1]):
        with pytest.raises(InvalidRequestError, match="more than any context holds: split it"):
            large.read()
    monkeypatch.setattr(listing, "MAX_DOCUMENTS", 2)
    with pytest.raises(TierForceError, match="more than 2 documents: split it into parts"):
        find_documents(lines)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_document_replaced_by_irregular_file_raises(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("It was")
    (document,) = find_documents(tmp_path).documents
    path.unlink()
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        document.read()
    IRREGULAR[kind](path)
    with pytest.raises(InvalidRequestError, match="is not a regular file"):
        document.read()


def test_maximum_id_length(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"id": "{"x" * count}", "text": "a"}}\n' for count in (4096, 4097)))
    first, second = find_documents(path).documents
    assert first.read().text == "a"
    with pytest.raises(InvalidRequestError, match="at most 4,096 characters"):
        second.read()


def test_generated_id_of_a_line_is_unique(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "line 2", "text": "x"}\nbroken\n{"id": "line 3", "text": "y"}\n[]\n')
    names = [document.id for document in find_documents(path).documents]
    assert names == ["line 2", "line 2 (2)", "line 3", "line 4"]


def test_line_changed_since_listing_raises(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n')
    first, second = find_documents(path).documents
    path.write_text('{"id": "b", "text": "y"}\n{"id": "b", "text": "z"}\n')
    with pytest.raises(InvalidRequestError, match="has changed since it was listed"):
        first.read()
    assert second.read().text == "z"


def test_json_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('[{"id": "a", "text": "x"}]')
    with pytest.raises(TierForceError, match=r"jq -c '\.\[\]' list\.json > list\.jsonl"):
        find_documents(path)


def test_links_are_followed_once_and_broken_links_are_reported(tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for place in (folder / "sub", other):
        place.mkdir(parents=True)
        (place / "a.txt").write_text("x")
    (folder / "linked").symlink_to(other)
    (folder / "again").symlink_to(folder / "sub")
    (folder / "sub/up").symlink_to(folder)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    found = find_documents(folder)
    assert [document.id for document in found.documents] == ["linked/a.txt", "sub/a.txt"]
    assert found.unreadable == [folder / "gone.txt", folder / "loop.txt"]


def test_folder_that_cannot_be_listed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scan = os.scandir

    def raise_for_closed(folder: Path) -> Any:
        if folder == tmp_path / "closed":  # simulated, since root may list everything
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", raise_for_closed)
    found = find_documents(tmp_path)
    assert [document.id for document in found.documents] == ["a.txt"]
    assert found.unreadable == [tmp_path / "closed"]


def test_deeply_nested_folder_is_searched(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(1100):
        deep = deep / "d"
        deep.mkdir()
    text = deep / "a.txt"
    text.write_text("x")
    assert len(find_documents(tmp_path).documents) == 1
    text.unlink()  # too deep for the clean-up of pytest
    while deep != tmp_path:
        deep.rmdir()
        deep = deep.parent


def test_digest_follows_the_content(tmp_path: Path) -> None:
    """It is that of the text for UTF-8 and for lines, so that it is the same in either."""
    (tmp_path / "a.txt").write_text("It was")
    (tmp_path / "in.jsonl").write_text('{"id": "a", "text": "It was"}\n')
    (tmp_path / "b.zip").write_bytes(archive({"c.txt": "It was", "d.txt": "the best"}))
    (text, first, second) = find_documents(tmp_path).documents
    (line,) = find_documents(tmp_path / "in.jsonl").documents
    expected = hashlib.sha256(b"It was").hexdigest()
    for each in (text, line):
        assert each.identify().digest == each.read().identity.digest == expected
    assert first.identify() != second.identify()
    assert second.identify() == second.read().identity
    (tmp_path / "b.zip").write_bytes(
        archive({"new.txt": "", "c.txt": "It was", "d.txt": "the end"})
    )
    listing = {each.id: each for each in find_documents(tmp_path).documents}
    assert listing["b.zip/c.txt"].identify() == first.identify()
    assert listing["b.zip/d.txt"].identify() != second.identify()


@pytest.mark.parametrize("kind", sorted(IRREGULAR.keys() - {"folder", "circular link"}))
def test_irregular_files_of_a_folder_are_skipped(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    IRREGULAR[kind](tmp_path / "b.txt")
    (tmp_path / "~$c.docx").write_text("lock of an office program")
    assert find_documents(tmp_path).skipped == {
        "not a regular file": ["b.txt"],
        "hidden": ["~$c.docx"],
    }


def test_include_is_for_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(TierForceError, match="--include selects files of a folder"):
        find_documents(tmp_path / "a.txt", include=["*.txt"])
