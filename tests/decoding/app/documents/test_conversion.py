"""Files made to harm cost one child process with limits, and an error that says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from decoding.app.documents import conversion, converter
from decoding.app.documents.document import Document
from decoding.app.documents.formats import kinds
from offload.errors import InvalidRequestError
from support.commands import wait_for
from support.document_files import archive, docx, docx_paragraph, epub, pdf

pytest.importorskip("mammoth")
pytest.importorskip("pypdfium2")

MIB = 1 << 20
BILLION = "".join(
    f'<!ENTITY e{level} "{f"&e{level - 1};" * 10}">' if level else '<!ENTITY e0 "ha">'
    for level in range(10)
)
BILLION = f"<!DOCTYPE x [{BILLION}]>"
EXTERNAL = '<!DOCTYPE x [<!ENTITY e9 SYSTEM "file:///etc/hostname">]>'


def read(content: bytes, name: str, folder: Path, **fields: Any) -> str:
    path = folder / name
    path.write_bytes(content)
    return Document(name, path, **fields).read().text


@pytest.mark.parametrize("doctype", [BILLION, EXTERNAL])
def test_xml_entities_are_not_expanded(doctype: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="XML entities"):
        read(docx(docx_paragraph("&e9;"), doctype), "a.docx", tmp_path)
    container = f"{doctype}<container><rootfile full-path='&e9;'/></container>"
    with pytest.raises(InvalidRequestError, match="XML entities"):
        read(archive({"META-INF/container.xml": container}), "a.epub", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("piece", "count", "reason"),
    [
        (bytes(MIB), 1024, "larger than 512 MiB"),
        (b"<a/>" * (MIB // 4), 100, "takes more than 2 GiB of memory"),
    ],
)
def test_zip_bomb_costs_no_more_than_the_limits(
    piece: bytes, count: int, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.docx"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("word/document.xml", "w", force_zip64=True) as member,
    ):
        member.write(b"<x>")
        for _ in range(count):
            member.write(piece)
    assert path.stat().st_size < 2 * MIB
    with pytest.raises(InvalidRequestError, match=reason):
        Document("bomb.docx", path).read()


def test_text_beyond_the_limit_is_an_error(tmp_path: Path) -> None:
    chapters = {f"{index}.xhtml": f"<p>{'x' * 9 * MIB}</p>" for index in range(4)}
    with pytest.raises(InvalidRequestError, match="larger than 32 MiB"):
        read(epub(chapters), "a.epub", tmp_path)


def test_deep_nesting_is_an_error(tmp_path: Path) -> None:
    html = f"<html><body>{'<div>' * 100_000}deep</body></html>".encode()
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        read(html, "a.html", tmp_path)
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        read(b"[" * 100_000, "a.ipynb", tmp_path)
    thousand = f"{'<div>' * 1000}Hel<b>lo</b>{'</div>' * 1000}<h1>Next</h1>".encode()
    assert read(thousand, "a.html", tmp_path) == "Hel**lo**\n\n# Next"


def test_picture_of_endless_size_costs_nothing(tmp_path: Path) -> None:
    """Only text is read: a picture is never decoded."""
    content = pdf([["text"]]).replace(b"%%EOF", b"%% " + zlib.compress(bytes(MIB)) + b"\n%%EOF")
    assert read(content, "a.pdf", tmp_path) == "text"


def run_converter(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the error of a child process that runs this code within the limits."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import os, resource, signal\n"
        "from decoding.app.documents import converter\n"
        f"converter._limit_resources()\n{code}"
    )
    monkeypatch.setattr(conversion, "module_arguments", lambda _: ["-c", program])
    (tmp_path / "a.html").write_text("x")
    with open(tmp_path / "a.html", "rb") as file, pytest.raises(InvalidRequestError) as error:
        conversion.convert(file, kinds.HTML)
    return str(error.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            "ended (Segmentation fault); the file may be damaged",
        ),
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 40)", "ended (Real-time signal 6)"),
        ("os.write(1, b'1\\n')", "ended with exit code 0"),
        ("os.write(1, bytes([123, 125, 10]))", "ended with exit code 0"),  # {} and a line end
        ("os.kill(os.getpid(), signal.SIGXCPU)", "more than 120 s of processor time"),
        ("bytearray(3 << 30)", "ended with exit code 1"),
        ("while True: os.write(1, bytes(1 << 20))", "larger than 32 MiB"),
    ],
)
def test_child_that_crashes_is_an_error(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reason in run_converter(code, monkeypatch, tmp_path)


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    """The child of a process that is killed ends, too, though it has time left."""
    started = tmp_path / "child"
    child = (
        f"import sys; sys.path[:] = {sys.path!r}; import os, time; from pathlib import Path\n"
        "from parallel.ranks.environment import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        f"Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(100)"
    )
    code = (
        "import os, decoding.app.documents.conversion as conversion\n"
        f"conversion.module_arguments = lambda _: ['-c', {child!r}]\n"
        "conversion.convert(open(os.devnull, 'rb'), 'html')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: started.exists() and started.read_text() != "")
    parent.kill()
    parent.wait()
    wait_for(lambda: not psutil.pid_exists(int(started.read_text())))


def test_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conversion, "_TIMEOUT_S", 0.5)
    assert "takes longer than" in run_converter("signal.pause()", monkeypatch, tmp_path)


def test_a_conversion_is_cancelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    polls = iter([False, True])
    with conversion.cancellable(lambda: next(polls)):
        assert "was cancelled" in run_converter("signal.pause()", monkeypatch, tmp_path)


def test_processor_time_is_limited() -> None:
    code = "import resource, decoding.app.documents.converter as c; c.PROCESSOR_S = 1; "
    code += "c._limit_resources()\nwhile True: pass"
    result = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert result.returncode == -signal.SIGXCPU


def test_current_folder_is_not_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of sources has modules named like those that the child imports."""
    for name in ("zipfile", "bs4", "resource", "html", "decoding"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert read(epub({"a.xhtml": "<p>x</p>"}), "a.epub", tmp_path).endswith("x")


def test_missing_library_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bs4", "pypdfium2", "charset_normalizer"):
        folder = tmp_path / "without" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"raise ModuleNotFoundError(name='{name}')")
    monkeypatch.syspath_prepend(tmp_path / "without")
    with pytest.raises(InvalidRequestError, match=r"needs pypdfium2: pip install 'tierforce\[doc"):
        read(pdf([["text"]]), "a.pdf", tmp_path)
    with pytest.raises(InvalidRequestError, match=r"needs bs4: pip install"):
        read(b"<p>x", "a.html", tmp_path)
    with pytest.raises(InvalidRequestError, match=r"pip install 'tierforce\[documents\]' .*iconv"):
        read("déjà vu".encode("latin1"), "a.txt", tmp_path)


def test_reasons_of_libraries_are_cut(tmp_path: Path) -> None:
    name = "x" * 5000
    container = f"<container><rootfile full-path='{name}'/></container>"
    with pytest.raises(InvalidRequestError) as error:
        read(archive({"META-INF/container.xml": container}), "a.epub", tmp_path)
    assert len(str(error.value)) <= converter._MAX_REASON


def test_child_is_the_first_to_end_where_memory_runs_out(tmp_path: Path) -> None:
    code = "import decoding.app.documents.converter as c; c._limit_resources(); "
    code += "print(open('/proc/self/oom_score_adj').read())"
    if not os.access("/proc/self/oom_score_adj", os.W_OK):
        pytest.skip("not writable here")
    assert subprocess.check_output([sys.executable, "-c", code]).split() == [b"1000"]
