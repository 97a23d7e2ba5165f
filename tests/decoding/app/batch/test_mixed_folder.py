"""Folders as people have them: documents of many kinds, broken ones, and ones that are too long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.batches import exit_after_answers, exit_after_records
from support.commands import GREEDY_FP32, MODELS, forked, records
from support.document_files import archive, docx, docx_paragraph, epub, odt, pdf, pptx
from support.prompts import write_passages

GOOD = "It was the best of times, it was the worst of times. "
BROKEN = {
    "broken.docx": docx(docx_paragraph(GOOD))[:200],
    "broken.pdf": b"%PDF-1.7",
    "empty.txt": b" \n",
    "noise.txt": bytes(range(256)) * 8,
    "scanned.pdf": pdf([[], []]),
}
LONG = ("long.epub", "long.pdf", "long.txt")
SHORT = ("--max-new-tokens", "12", "--context", "400", "--instruction", "Sum up.")


def good_documents(number: int) -> dict[str, bytes]:
    """Return a short document of each of 11 kinds."""
    text = f"{GOOD}Number {number}. "
    cells = f'{{"cells": [{{"cell_type": "markdown", "source": ["{text}"]}}], "nbformat": 4}}'
    return {
        f"{number}.csv": f"{text},{number}\n".encode(),
        f"{number}.docx": docx(docx_paragraph(text)),
        f"{number}.epub": epub({"a.xhtml": f"<p>{text}</p>"}),
        f"{number}.html": f"<p>{text}</p>".encode(),
        f"{number}.ipynb": cells.encode(),
        f"{number}.md": text.encode("utf-16"),
        f"{number}.odt": odt(f"<text:p>{text}</text:p>"),
        f"{number}.pdf": pdf([[text]]),
        f"{number}.pptx": pptx([("Times", text)]),
        f"{number}.srt": f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n".encode(),
        f"{number}.txt": text.encode(),
    }


def write_folder(folder: Path) -> list[str]:
    """Write 30 documents; return their ids, in order."""
    folder.mkdir()
    write_passages(folder, {"long.txt": 900})
    text = (folder / "long.txt").read_text().replace("<", "").replace("&", "")
    lines = [line for line in text.encode("ascii", "ignore").decode().splitlines() if line.strip()]
    (folder / "long.pdf").write_bytes(pdf([lines[:40], lines[40:]]))
    (folder / "long.epub").write_bytes(
        epub({"a.xhtml": "".join(f"<p>{line}</p>" for line in lines)})
    )
    good = good_documents(1) | good_documents(2)
    packed = dict(list(good.items())[-3:])
    (folder / "packed.zip").write_bytes(archive(packed))
    for name, content in (BROKEN | good).items():
        if name not in packed:
            (folder / name).write_bytes(content)
    names = [f"packed.zip/{name}" if name in packed else name for name in (*BROKEN, *LONG, *good)]
    assert len(names) == 30
    return sorted(names, key=lambda name: name.split("/"))


@pytest.mark.slow
@pytest.mark.parametrize("output", ["out.md", "out/"])
def test_thirty_documents_end_as_thirty_records_in_order_though_killed_twice(
    output: str, tmp_path: Path
) -> None:
    for module in ("mammoth", "pypdfium2", "pptx"):
        pytest.importorskip(module)
    ids = write_folder(tmp_path / "in")
    paths = ("--input", str(tmp_path / "in"), "--output", f"{tmp_path}/{output}")
    command = ("summarize", *MODELS, *GREEDY_FP32, *SHORT, *paths, "--concurrency", "3")
    kills: list[Callable[[], None] | None] = [
        partial(exit_after_records, 18),
        partial(exit_after_answers, 2),
        None,
    ]
    results = [forked(tmp_path, *command, before=kill) for kill in kills]
    assert [result.code for result in results] == [9, 9, 1]
    path = tmp_path / ("out.jsonl" if output == "out.md" else "out/records.jsonl")
    found = records(path)
    assert [record["id"] for record in found] == ids
    assert {record["id"] for record in found if "error" in record} == set(BROKEN)
    assert {record["id"] for record in found if "parts" in record} == set(LONG)
    errors = [line for line in results[-1].err.splitlines() if "failed" in line]
    assert all(any(name in line for line in errors) for name in BROKEN)
    assert "25 of 30 documents finished" in results[-1].err
    shown = forked(tmp_path, "show", f"{tmp_path}/{output}", "--format", "md").out
    headings = [line[2:] for line in shown.splitlines() if line.startswith("# ")]
    assert headings == ids
    if output == "out.md":
        assert (tmp_path / output).read_text().endswith(shown)
    else:
        files = sorted((tmp_path / output).rglob("*.md"))
        assert len(files) == 30
        assert "\n".join(path.read_text().split("\n\n", 1)[1] for path in files) == shown
    kept = {"in", "out.jsonl", "out.md", "out"}
    assert not [path for path in tmp_path.iterdir() if path.name not in kept]
