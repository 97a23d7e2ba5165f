"""Small documents in every format, and archives, as bytes."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence

DOCX_NAMESPACE = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
ODT_NAMESPACES = {"office": "office", "text": "text", "table": "table", "draw": "drawing"}
ODT_NAMESPACES |= {"svg": "svg-compatible"}
RELATIONSHIPS = "http://schemas.openxmlformats.org/package/2006/relationships"


def archive(members: Mapping[str, str | bytes]) -> bytes:
    """Return a ZIP archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def pdf(pages: Sequence[Sequence[str]], trailer: str = "") -> bytes:
    """Return a PDF of pages of lines in Latin-1; an empty page has no text."""
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(pages)))
    objects: list[bytes] = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        font.encode(),
    ]
    for index, lines in enumerate(pages):
        page = (
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F 3 0 R "
            f">> >> /Contents {5 + 2 * index} 0 R >>"
        )
        escaped = [line.translate({40: r"\(", 41: r"\)", 92: r"\\"}) for line in lines]
        shown = "".join(f"({line}) Tj T*\n" for line in escaped)
        content = zlib.compress(f"BT /F 11 Tf 14 TL 50 740 Td\n{shown}ET".encode("latin1"))
        stream = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream"
        objects += [page.encode(), stream % (len(content), content)]
    output, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        offsets.append(len(output))
        output += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(output)
    output += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    output += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    output += f"trailer << /Size {size} /Root 1 0 R {trailer}>>\nstartxref\n{start}\n%%EOF".encode()
    return bytes(output)


def epub(
    chapters: Mapping[str, str],
    lost: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    hrefs: Sequence[str] = (),
    media_type: str = "application/xhtml+xml",
) -> bytes:
    """Return an EPUB of chapters by name; those in `lost` are in its list, but not in the file.

    `hrefs` are the references in its list, if they differ from the names, and `media_type` what it
    says of them.
    """
    names = hrefs or [*chapters, *lost]
    kinds = {"jpg": "image/jpeg"}
    items = "".join(
        f'<item id="i{index}" href="{name}" '
        f'media-type="{kinds.get(name.rpartition(".")[2], media_type)}"/>'
        for index, name in enumerate(names)
    )
    spine = "".join(f'<itemref idref="i{index}"/>' for index in range(len(names)))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The Title</dc:title><dc:creator>'
        f"An Author</dc:creator></metadata><manifest>{items}</manifest><spine>{spine}</spine>"
        "</package>"
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
        'full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    pages = {
        f"OEBPS/{name}".replace("%20", " "): f"<html><body>{body}</body></html>"
        for name, body in chapters.items()
    }
    return archive(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": container,
            "OEBPS/book.opf": package,
            **pages,
            **(more or {}),
        }
    )


def docx(
    body: str,
    doctype: str = "",
    more: Mapping[str, str] | None = None,
    part: str = "word/document.xml",
) -> bytes:
    """Return a .docx with a body of WordprocessingML in its main part, and more members."""
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    return archive(
        {
            "[Content_Types].xml": (
                f'<Types xmlns="{types}"><Default Extension="rels" ContentType="application/'
                'vnd.openxmlformats-package.relationships+xml"/><Override PartName="/'
                f'{part}" ContentType="{main}"/></Types>'
            ),
            "_rels/.rels": (
                f'<Relationships xmlns="{RELATIONSHIPS}"><Relationship Id="r1" Type="{office}" '
                f'Target="{part}"/></Relationships>'
            ),
            part: (
                f'{doctype}<w:document xmlns:w="{DOCX_NAMESPACE}"><w:body>{body}</w:body>'
                "</w:document>"
            ),
            **(more or {}),
        }
    )


def docx_paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def odt(body: str, mimetype: str = "application/vnd.oasis.opendocument.text") -> bytes:
    """Return an .odt with a body of OpenDocument text."""
    namespaces = "".join(
        f' xmlns:{prefix}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for prefix, name in ODT_NAMESPACES.items()
    )
    content = (
        f"<office:document-content{namespaces}><office:body><office:text>{body}</office:text>"
        "</office:body></office:document-content>"
    )
    return archive({"mimetype": mimetype, "content.xml": content})


def pptx(slides: Sequence[tuple[str, str]]) -> bytes:
    """Return a .pptx of slides with a title and a text."""
    from pptx import Presentation

    presentation = Presentation()
    for title, text in slides:
        slide = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, text
    buffer = io.BytesIO()
    presentation.save(buffer)
    return buffer.getvalue()
