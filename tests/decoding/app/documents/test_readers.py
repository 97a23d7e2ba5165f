"""Documents in every format are read as text, in order, and say what they lack."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from decoding.app.documents.document import Document, DocumentText
from decoding.app.documents.formats.subtitles import spoken_text
from offload.errors import InvalidRequestError
from support.document_files import archive, docx, docx_paragraph, epub, odt, pdf, pptx
from support.slow import slow_except

pytest.importorskip("mammoth")
pytest.importorskip("pypdfium2")

LINES = ["It was the best of times,", "it was the (worst) of times."]
SRT = """1
00:00:01,000 --> 00:00:03,500
<i>It was the best</i>

2
00:00:03,500 --> 00:00:05,000 X1:40
<i>It was the best</i>
of times
"""
T1, T2 = "00:00:01,000 --> 00:00:02,000", "00:00:03,000 --> 00:00:04,000"
VTT = """WEBVTT

NOTE not spoken

intro
00:01.000 --> 00:03.500 align:start
It was <00:00:02.000>the <c.loud>best</c>

00:03.500 --> 00:05.000
5 < 6 of times
"""


def read(content: bytes | str, name: str, folder: Path) -> DocumentText:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Document(name, path).read()


def test_pdf_pages_are_read_in_order(tmp_path: Path) -> None:
    document = read(pdf([LINES, ["Second page: café"]]), "a.pdf", tmp_path)
    assert document.text == "\n".join(LINES) + "\n\nSecond page: café"
    assert document.source == {"format": "pdf", "pages": 2, "pages_without_text": 0}
    assert document.warning is None


def test_pages_without_text_are_counted(tmp_path: Path) -> None:
    few = read(pdf([LINES] * 19 + [[]]), "few.pdf", tmp_path)
    assert (few.source["pages_without_text"], few.warning) == (1, None)
    many = read(pdf([LINES, []]), "many.pdf", tmp_path)
    assert many.warning == "pages without text, perhaps scanned: 1 of 2"
    with pytest.raises(InvalidRequestError, match=r"none of its 2 pages has text.*ocrmypdf"):
        read(pdf([[], []]), "scan.pdf", tmp_path)


def test_pdf_with_a_password_is_an_error(tmp_path: Path) -> None:
    key = "0" * 64
    encryption = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{key}> /U <{key}> /P -4 >> "
    content = pdf([LINES], f"{encryption}/ID [<00><00>] ")
    with pytest.raises(InvalidRequestError, match=r"PDF is encrypted.*qpdf --decrypt"):
        read(content, "a.pdf", tmp_path)


def test_epub_chapters_are_read_in_order_of_the_spine(tmp_path: Path) -> None:
    chapters = {
        "z.xhtml": "<h1>One</h1><p>First <a href='x'>link</a> my_var.</p>",
        "a%20b.xhtml": "<h1>Two</h1><p>Second</p><script>no()</script>",
    }
    document = read(epub(chapters), "a.epub", tmp_path)
    assert document.text == (
        "The Title\n\nAn Author\n\n# One\n\nFirst link my_var.\n\n# Two\n\nSecond"
    )
    assert document.source == {"format": "epub", "chapters": 2}


def test_epub_says_which_chapters_are_missing(tmp_path: Path) -> None:
    document = read(epub({"a.xhtml": "<p>Only</p>"}, ["b.xhtml"]), "a.epub", tmp_path)
    assert document.warning == "chapters missing in the file: 1 of 2"
    with pytest.raises(InvalidRequestError, match="none of the 1 chapters"):
        read(epub({}, ["b.xhtml"]), "b.epub", tmp_path)


@pytest.mark.parametrize("is_font", [False, True])
def test_protected_epub_is_an_error(is_font: bool, tmp_path: Path) -> None:
    name = "OEBPS/font.otf" if is_font else "OEBPS/a.xhtml"
    encryption = (
        '<encryption xmlns:e="http://www.w3.org/2001/04/xmlenc#"><e:EncryptedData>'
        '<e:EncryptionMethod Algorithm="http://www.w3.org/2001/04/xmlenc#aes256-cbc"/>'
        f'<e:CipherData><e:CipherReference URI="{name}"/></e:CipherData></e:EncryptedData>'
        "</encryption>"
    )
    content = epub({"a.xhtml": "<p>Text</p>"}, more={"META-INF/encryption.xml": encryption})
    if is_font:
        assert read(content, "a.epub", tmp_path).text.endswith("Text")
    else:
        with pytest.raises(InvalidRequestError, match="encrypted chapters: 1 of 1"):
            read(content, "a.epub", tmp_path)


def test_references_in_an_epub_are_followed(tmp_path: Path) -> None:
    """Absolute, with a fragment, or the same chapter twice; pictures are no chapters."""
    chapters = {"a.xhtml": "<p>One</p>", "b.xhtml": "<p>Two</p>", "c.jpg": "\xff\xd8"}
    content = epub(chapters, hrefs=["/OEBPS/a.xhtml", "b.xhtml#two", "a.xhtml#later", "c.jpg"])
    document = read(content, "a.epub", tmp_path)
    assert document.text == "The Title\n\nAn Author\n\nOne\n\nTwo"
    assert document.source == {"format": "epub", "chapters": 2}


@pytest.mark.parametrize(
    "kind", ["application/x-dtbook+xml", "text/xml", "application/xhtml+xml; charset=utf-8"]
)
def test_chapters_of_any_kind_of_text_are_read(kind: str, tmp_path: Path) -> None:
    content = epub({"a.xhtml": "<p>One</p>"}, media_type=kind)
    assert read(content, "a.epub", tmp_path).text.endswith("One")


def test_damaged_page_is_a_note(tmp_path: Path) -> None:
    content = pdf([LINES, LINES]).replace(b"[4 0 R 6 0 R]", b"[4 0 R 9 0 R]")
    document = read(content, "a.pdf", tmp_path)
    assert document.text == "\n".join(LINES)
    assert document.warning == "damaged pages, which were not read: 1 of 2"
    with pytest.raises(InvalidRequestError, match="has no pages"):
        read(pdf([]), "b.pdf", tmp_path)


def test_docx_says_what_was_not_read(tmp_path: Path) -> None:
    field = (
        '<w:p><w:fldSimple w:instr="MERGEFIELD x"><w:r><w:t>Smith</w:t></w:r></w:fldSimple></w:p>'
    )
    document = read(docx(docx_paragraph("Dear") + field), "a.docx", tmp_path)
    assert document.warning == "elements that were not read: fldSimple"


def test_docx_of_word_for_the_web_is_read(tmp_path: Path) -> None:
    content = docx(docx_paragraph("text"), part="word/document2.xml")
    assert read(content, "a.docx", tmp_path).text == "text"


def test_style_map_of_a_docx_is_not_obeyed(tmp_path: Path) -> None:
    content = docx(docx_paragraph("text"), more={"mammoth/style-map": "p => !"})
    assert read(content, "a.docx", tmp_path).text == "text"


def test_pptx_tables_groups_and_notes_are_read(tmp_path: Path) -> None:
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE
    from pptx.util import Inches

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
    place = (Inches(1),) * 4
    table = slide.shapes.add_table(2, 1, *place).table
    table.cell(0, 0).text, table.cell(1, 0).text = "head", "cell"
    group = slide.shapes.add_group_shape()
    group.shapes.add_textbox(*place).text_frame.text = "in a group"
    slide.notes_slide.notes_text_frame.text = "spoken\vwords"
    second = presentation.slides.add_slide(presentation.slide_layouts[5])
    second.shapes.title.text = "Two\vlines"
    box = second.shapes.add_textbox(*place)
    box.text_frame.text = "same id"
    box._element.nvSpPr.cNvPr.set("id", str(second.shapes.title.shape_id))
    data = CategoryChartData()
    data.categories = ["x"]
    data.add_series("s", [1])
    second.shapes.add_chart(XL_CHART_TYPE.PIE, *place, data)
    presentation.slides.add_slide(presentation.slide_layouts[5])  # an empty title
    presentation.save(path := tmp_path / "a.pptx")
    document = Document("a.pptx", path).read()
    assert document.text == (
        "| head |\n| --- |\n| cell |\n\nin a group\n\nNotes: spoken\nwords\n\n"
        "# Two lines\n\nsame id"
    )
    assert document.warning == "charts and diagrams that were not read: 1"


def test_encrypted_odt_is_an_error(tmp_path: Path) -> None:
    manifest = "<manifest:encryption-data/>"
    for members in (
        {"content.xml": "\x93", "META-INF/manifest.xml": manifest},
        {"mimetype": "application/vnd.oasis.opendocument.text", "encrypted-package": "x"},
    ):
        with pytest.raises(InvalidRequestError, match="encrypted: save it without a password"):
            read(archive(members), "a.odt", tmp_path)


@pytest.mark.parametrize("name", ["a.rtf", "a.mobi", "a.xlsx", "a.tar.gz"])
def test_other_format_says_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"is not read: .*(save|convert|unpack)"):
        read("{\\rtf1 text}", name, tmp_path)


def test_docx_keeps_headings_and_tables(tmp_path: Path) -> None:
    cell = "<w:tc>{}</w:tc>"
    row = "<w:tr>" + cell.format(docx_paragraph("a")) + cell.format(docx_paragraph("b")) + "</w:tr>"
    heading = '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Chapter</w:t></w:r></w:p>'
    document = read(
        docx(f"{heading}{docx_paragraph('my_var *')}<w:tbl>{row * 2}</w:tbl>"), "a.docx", tmp_path
    )
    assert document.text.startswith("# Chapter\n\nmy_var *\n\n| a | b |\n| --- | --- |\n| a | b |")
    assert document.source == {"format": "docx"}


def test_pptx_slides_are_read_in_order(tmp_path: Path) -> None:
    text = read(pptx([("One", "first"), ("Two", "second")]), "a.pptx", tmp_path).text
    assert [text.index(each) for each in ("# One", "first", "# Two", "second")] == sorted(
        text.index(each) for each in ("# One", "first", "# Two", "second")
    )


def test_odt_keeps_structure_and_leaves_out_what_is_not_text(tmp_path: Path) -> None:
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    row = f"<table:table-row>{cell.format('a')}{cell.format('b')}</table:table-row>"
    body = (
        "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>"
        '<text:h text:outline-level="2">Part &amp; One</text:h>'
        "<text:p>It<text:s/>was<office:annotation><text:p>comment</text:p></office:annotation> "
        "the <text:span>best</text:span><text:note><text:note-citation>1</text:note-citation>"
        "<text:note-body><text:p>Charles</text:p><text:p>Dickens.</text:p></text:note-body>"
        "</text:note> of times.</text:p>"
        "<text:list><text:list-item><text:p>item</text:p></text:list-item></text:list>"
        f"<table:table>{row * 2}</table:table>"
        "<text:p><text:title>Field</text:title><draw:image><svg:title>no</svg:title>"
        "<office:binary-data>iVBO</office:binary-data></draw:image><draw:object/></text:p>"
    )
    document = read(odt(body), "a.odt", tmp_path)
    assert document.text == (
        "## Part & One\n\nIt was the best (Charles Dickens.) of times.\n\n* item\n\n"
        "| a | b |\n| --- | --- |\n| a | b |\n\nField"
    )
    note = "formulas and other objects that were not read: 1"
    assert document.source == {"format": "odt", "note": note}


def test_spreadsheet_is_no_text_document(tmp_path: Path) -> None:
    mimetype = "application/vnd.oasis.opendocument.spreadsheet"
    with pytest.raises(InvalidRequestError, match="spreadsheet, not an OpenDocument text"):
        read(odt("", mimetype), "a.odt", tmp_path)


def test_html_is_read_in_its_encoding(tmp_path: Path) -> None:
    body = "<body><style>p {}</style><h2>Café</h2><p>a_b <b>c</b></p><img src='x'></body>"
    meta = '<head><meta charset="iso-8859-1"></head>'
    for encoding in ("utf-8", "latin1", "utf-16"):
        content = f"<html>{meta if encoding == 'latin1' else ''}{body}</html>".encode(encoding)
        document = read(content, "a.html", tmp_path)
        assert document.text == "## Café\n\na_b **c**"
        expected = "cp1252" if encoding == "latin1" else encoding
        assert document.source == {"format": "html", "encoding": expected}


def test_damaged_characters_of_html_are_counted(tmp_path: Path) -> None:
    content = '<meta charset="utf-8"><p>日本 café</p>'.encode() + b"<p>\xe6\x97<p>after"
    document = read(content, "a.html", tmp_path)
    assert document.text == "日本 café\n\n\ufffd\n\nafter"
    assert document.warning == "damaged characters: 1"
    for binary in (b"<p>a\0b", bytes(range(256)) * 10):
        with pytest.raises(InvalidRequestError, match=r"binary|not UTF-8"):
            read(binary, "b.html", tmp_path)


def test_html_without_a_declaration_follows_the_rules_for_text(tmp_path: Path) -> None:
    french = "<p>Le père Goriot, après avoir quitté les affaires, s'était retiré à l'hôtel.</p>" * 9
    document = read(french.encode("cp1252"), "a.html", tmp_path)
    assert document.source["encoding"] == "cp1252"
    assert "père Goriot, après" in document.text
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        read("<p>Zażółć gęślą jaźń</p>".encode("iso8859-2"), "b.html", tmp_path)


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", "“quoted” 5 €"),
        ("shift_jis", "cp932", "①髙"),
        ("gb2312", "gb18030", "㐀"),
        ("utf8", "utf-8", "日本"),
    ],
)
def test_declared_encodings_are_those_of_browsers(
    declared: str, encoding: str, text: str, tmp_path: Path
) -> None:
    content = f'<meta charset="{declared}"><p>{text}</p>'.encode(encoding) + b"\xff" * (
        encoding == "utf-8"
    )
    document = read(content, "a.html", tmp_path)
    assert document.text.startswith(text)
    assert document.source["encoding"] == encoding


def test_exponents_and_descriptions_of_pictures_are_read(tmp_path: Path) -> None:
    page = '<p>6.02 e 10<sup>23</sup> <img alt="E = mc" src="x"></p><svg><title>no</title></svg>'
    assert read(page, "a.html", tmp_path).text == "6.02 e 10^23 E = mc"


def test_title_and_text_after_the_body_are_read(tmp_path: Path) -> None:
    head = "<html><head><title>The Title</title></head>"
    page = f"{head}<body><p>a</p></body><p>b<!-- c --></p><body><p>d"
    assert read(page, "a.html", tmp_path).text == "The Title\n\na\n\nb\n\nd"


def test_notebook_without_a_language(tmp_path: Path) -> None:
    notebook = {
        "metadata": {"kernelspec": {"language": None}, "language_info": {"name": "julia"}},
        "cells": [{"cell_type": "code", "source": "x"}, {"cell_type": "code", "source": ""}],
    }
    assert read(json.dumps(notebook), "a.ipynb", tmp_path).text == "```julia\nx\n```"


def test_notebook_of_version_3_and_another_language(tmp_path: Path) -> None:
    notebook = {
        "metadata": {"kernelspec": {"language": "R"}},
        "worksheets": [{"cells": [{"cell_type": "code", "input": ["x <- 1"]}]}],
    }
    assert read(json.dumps(notebook), "a.ipynb", tmp_path).text == "```R\nx <- 1\n```"


def test_notebook_cells_are_read_in_order(tmp_path: Path) -> None:
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "source": ["# Title\n", "Café"]},
        {"cell_type": "code", "source": ["x = 1"], "outputs": [{"text": "no"}]},
    ]
    text = read(json.dumps({"cells": cells}), "a.ipynb", tmp_path).text
    assert text == "# Title\nCafé\n\n```python\nx = 1\n```"


def test_subtitles_are_what_is_spoken(tmp_path: Path) -> None:
    assert read(SRT, "a.srt", tmp_path).text == "It was the best\nIt was the best\nof times"
    document = read(SRT.replace("best", "b\xeast").encode("latin1") * 9, "b.srt", tmp_path)
    assert (document.text[:15], document.source["encoding"]) == ("It was the bêst", "cp1252")
    assert spoken_text(VTT.replace("\n", "\r\n")) == "It was the best\n5 < 6 of times"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # cues without an empty line between them
        (f"1\n{T1}\nOne\n2\n{T2}\nTwo", "One\nTwo"),
        # a number apart from its times, and two paragraphs in a cue
        (f"1\n\n{T1}\nOne\n\nmore", "One\nmore"),
        (f"1\r{T1}\r12\r\r2\r{T2}\rNo.\rNo.", "12\nNo.\nNo."),
        (f"{T1}\nI <3 you <heart>\nNOTE this\n{{\\an8}}top", "I <3 you <heart>\nNOTE this\ntop"),
        (f"{T1}\nif a <b and c> d\n<font color='red'>e</font>", "if a <b and c> d\ne"),
        (
            f"WEBVTT\nKind: x\n\nname\n{T1}\nQ &amp; A\n\nNOTE\nno\n\n2\n{T2}\nQ &amp; A\nnext",
            "Q & A\nQ & A\nnext",
        ),
        (f"WEBVTT\nKind: captions\n{T1}\nfoo", "foo"),
        (f"WEBVTT\n\n{T1}\nNo.\n\n{T2}\nNo.", "No.\nNo."),
        (f"WEBVTT\n\n{T1}\na <00:00:01.5>b\n\n{T2}\na b\nc", "a b\nc"),
        (f"{T1}\nHi\n\n42\n\n{T2}\nYes", "Hi\n42\nYes"),
        (f"WEBVTTish\n{T1}\nfoo", "WEBVTTish\nfoo"),
    ],
)
def test_no_spoken_line_is_lost(text: str, expected: str) -> None:
    assert spoken_text(text) == expected


def test_recognised_encoding_is_a_warning(tmp_path: Path) -> None:
    text = "Le père Goriot, après avoir quitté les affaires, s'était retiré à l'hôtel.\n" * 3
    document = read(text.encode("latin1"), "a.txt", tmp_path)
    assert document.text == text
    note = "read as cp1252, by its letters; if some are wrong, convert it"
    assert document.source == {"format": "text", "encoding": "cp1252", "note": note}
    assert document.warning == note


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (pdf([LINES]), "a.txt", "pdf"),
        (pdf([LINES]), "report", "pdf"),
        (docx(docx_paragraph("x")), "a.odt", "docx"),
        (epub({"a.xhtml": "x"}), "book.md", "epub"),
    ],
)
def test_content_decides_over_the_suffix(
    content: bytes, name: str, expected: str, tmp_path: Path
) -> None:
    assert read(content, name, tmp_path).source["format"] == expected


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (b"%PDF-1.4\nbroken", "a.pdf", "not a PDF, or a damaged one"),
        (b"<html>Log in</html>", "a.pdf", "not a PDF"),
        (pdf([LINES])[:300], "a.pdf", "damaged"),
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512),
            "a.docx",
            "old Office file, or one with",
        ),
        (b"no archive", "a.docx", "may be damaged .BadZipFile"),
        (docx(docx_paragraph("x"))[:-30], "a.docx", "may be damaged .BadZipFile"),
        (archive({"a.txt": "x"}), "a.docx", "ZIP archive, but neither an EPUB"),
        (archive({"META-INF/container.xml": "<x/>"}), "a.epub", "names no package document"),
        (archive({"META-INF/container.xml": "<x"}), "a.epub", "not valid XML"),
        (archive({"content.xml": "<x/>"}), "a.odt", "has no body"),
        (b"[1, 2]", "a.ipynb", "not a Jupyter notebook"),
        (b"{", "a.ipynb", "not a Jupyter notebook"),
        (docx(""), "a.docx", "the document is empty"),
        (b"1\n00:00:01,000 --> 00:00:02,000\n\n", "a.srt", "the document is empty"),
    ],
)
def test_broken_document_is_one_clear_line(
    content: bytes, name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as error:
        read(content, name, tmp_path)
    assert "\n" not in str(error.value)
    assert "NUL" not in str(error.value)


@pytest.mark.parametrize(
    "name", slow_except(["a.pdf", "a.html", "a.docx", "a.odt", "a.epub", "a.ipynb"], 1)
)
def test_digest_of_a_large_file_is_that_of_its_bytes(name: str, tmp_path: Path) -> None:
    """The child process reads from the same open file, and moves its position."""
    words = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(30_000)]
    text = " ".join(words)
    contents = {
        "a.pdf": lambda: pdf([words[start : start + 60] for start in range(0, len(words), 60)]),
        "a.html": lambda: f"<p>{text}</p>".encode(),
        "a.docx": lambda: docx(docx_paragraph(text)),
        "a.odt": lambda: odt(f"<text:p>{text}</text:p>"),
        "a.epub": lambda: epub({"a.xhtml": f"<p>{text}</p>"}),
        "a.ipynb": lambda: json.dumps(
            {"cells": [{"cell_type": "markdown", "source": text}]}
        ).encode(),
    }
    path = tmp_path / name
    path.write_bytes(content := contents[name]())
    assert len(content) > 1 << 20
    document = Document(name, path)
    expected = hashlib.sha256(content).hexdigest()
    assert document.read().identity.digest == document.identify().digest == expected
    assert words[-1] in document.read().text
