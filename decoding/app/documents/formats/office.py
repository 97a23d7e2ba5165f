"""Text of .docx, .pptx and .odt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any, BinaryIO

from decoding.app.documents.formats.archives import Archive, parse_xml
from decoding.app.documents.formats.markup import markdown
from offload.errors import InvalidRequestError

_GRAPHIC = "{http://schemas.openxmlformats.org/drawingml/2006/main}graphicData"
_TABLE = "{http://schemas.openxmlformats.org/drawingml/2006/main}tbl"
_ALTERNATIVE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}AlternateContent"
_IGNORED = re.compile(r"An unrecognised element was ignored: (?:\{[^}]*\}|\w+:)?(\w+)")


def read_docx(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    """Return the body of a Word document, without headers, footers and comments."""
    import mammoth

    no_picture = mammoth.images.img_element(lambda _: {"src": ""})
    result = mammoth.convert_to_html(
        file, include_embedded_style_map=False, convert_image=no_picture
    )
    source: dict[str, Any] = {"format": "docx"}
    ignored = {match[1] for each in result.messages if (match := _IGNORED.match(each.message))}
    if ignored:
        source["note"] = f"elements that were not read: {', '.join(sorted(ignored))}"
    return markdown(result.value)[0], source


def read_pptx(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    """Return all slides of a presentation in order: text, tables, and the speaker's notes."""
    from pptx import Presentation

    presentation = Presentation(file)
    slides = list[str]()
    unread = 0
    for slide in presentation.slides:
        title = slide.shapes.title
        blocks = list(_shapes(slide.shapes))
        if title is not None and (heading := " ".join(title.text_frame.text.split())):
            blocks.remove(_frame_text(title.text_frame))
            blocks.insert(0, f"# {heading}")
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = _frame_text(slide.notes_slide.notes_text_frame)
            blocks += [f"Notes: {notes}"] if notes else []
        slides.append("\n\n".join(filter(None, blocks)))
        graphics = slide.shapes.element.iter(_GRAPHIC)
        unread += sum(graphic.find(_TABLE) is None for graphic in graphics)
        unread += sum(1 for _ in slide.shapes.element.iter(_ALTERNATIVE))
    source: dict[str, Any] = {"format": "pptx", "slides": len(slides)}
    if unread:
        source["note"] = f"charts and diagrams that were not read: {unread}"
    return "\n\n".join(filter(None, slides)), source


def _frame_text(frame: Any) -> str:
    """Return the text of a frame, in which a line break is a vertical tab."""
    text: str = frame.text.replace("\v", "\n").strip()
    return text


def _shapes(shapes: Iterable[Any]) -> Iterator[str]:
    """Yield the text of shapes, groups included."""
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        elif getattr(shape, "has_table", False):
            rows = (
                "".join(f"<td>{escape(_frame_text(cell.text_frame))}</td>" for cell in row.cells)
                for row in shape.table.rows
            )
            yield markdown(f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")[0]
        elif getattr(shape, "has_text_frame", False):
            yield _frame_text(shape.text_frame)


_ODT = b"application/vnd.oasis.opendocument.text"
# elements of OpenDocument text (OpenDocument 1.3, part 3), and what they are in HTML
_ODT_TAGS = {"p": "p", "list": "ul", "list-item": "li", "table": "table", "table-row": "tr"}
_ODT_TAGS |= {"table-cell": "td", "covered-table-cell": "td"}
_ODT_BREAKS = {"line-break": "<br>", "tab": "\t", "s": " "}
# comments, deleted text, numbers of footnotes, forms, templates of indices, data
_ODT_SKIPPED = re.compile(
    "annotation|tracked-changes|note-citation|forms|.*-source|binary-data|script|object"
)
_SVG = "{urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0}"  # titles of pictures
_ODT_PARAGRAPH = re.compile("</?p>")


def read_odt(archive: Archive) -> tuple[str, dict[str, Any]]:
    """Return the body of an OpenDocument text; footnotes are in parentheses.

    Raises InvalidRequestError if it is encrypted, or another kind of OpenDocument.
    """
    manifest = archive.read("META-INF/manifest.xml", is_optional=True)
    if b"encryption-data" in manifest or "encrypted-package" in archive.names:
        raise InvalidRequestError("it is encrypted: save it without a password.")
    mimetype = archive.read("mimetype", is_optional=True).strip() or _ODT
    if mimetype != _ODT:
        raise InvalidRequestError(
            f"it is {mimetype[:60].decode(errors='replace')}, not an OpenDocument text: save it as "
            ".odt or .pdf."
        )
    body = parse_xml(archive.read("content.xml"), "content.xml").find(".//{*}body")
    if body is None:
        raise InvalidRequestError("content.xml in it has no body: the file is damaged.")
    source: dict[str, Any] = {"format": "odt"}
    if objects := len(body.findall(".//{*}object")):
        source["note"] = f"formulas and other objects that were not read: {objects}"
    return markdown("".join(_odt_html(body)))[0], source


def _odt_html(element: Any) -> Iterator[str]:
    """Yield the HTML of an element of OpenDocument text, without the text after it."""
    name = element.tag.rpartition("}")[2]
    if _ODT_SKIPPED.fullmatch(name) or element.tag.startswith(_SVG):
        return
    if name in _ODT_BREAKS:
        yield _ODT_BREAKS[name]
        return
    tag = _ODT_TAGS.get(name)
    if name == "h":
        level = next((value for key, value in element.items() if key.endswith("outline-level")), "")
        tag = f"h{min(6, int(level))}" if level.isdecimal() and level != "0" else "h1"
    inner = "".join([escape(element.text or ""), *_odt_children(element)])
    if name == "note-body":
        inner = f" ({' '.join(_ODT_PARAGRAPH.sub(' ', inner).split())})"
    yield f"<{tag}>{inner}</{tag}>" if tag else inner


def _odt_children(element: Any) -> Iterator[str]:
    for child in element:
        yield from _odt_html(child)
        yield escape(child.tail or "")
