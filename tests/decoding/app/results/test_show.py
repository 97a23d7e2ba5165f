"""`show` prints the results of a batch for reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.results.record_lines import last_records
from decoding.app.results.records import Records
from support.commands import forked, refused

RECORDS = [
    {"id": "a.txt", "summary": "Old.", "versions": {}, "max_new_tokens": 9},
    {"id": "b.pdf", "summary": "Of b.", "versions": {}, "max_new_tokens": 9},
    {"id": "a.txt", "summary": "New.\x1b[2J", "versions": {}, "max_new_tokens": 9},
    {"id": "c.pdf", "error": "it is empty.", "kind": "InvalidRequestError", "versions": {}},
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in RECORDS))
    return path


def test_the_last_record_of_each_document_is_printed(results: Path, tmp_path: Path) -> None:
    result = forked(tmp_path, "show", str(results))
    assert result.code == 0, result.err
    assert result.out == (
        "b.pdf\n=====\n\nOf b.\n\na.txt\n=====\n\nNew.\\x1b[2J\n\n"
        "c.pdf\n=====\n\nFailed: it is empty.\n"
    )
    result = forked(tmp_path, "show", str(results), "--format", "jsonl")
    assert [json.loads(line) for line in result.out.splitlines()] == RECORDS[1:]


@pytest.mark.parametrize(
    ("documents", "printed"),
    [
        (["a.txt"], ["a.txt"]),
        (["*.pdf"], ["b.pdf", "c.pdf"]),
        (["c*", "*"], ["c.pdf", "b.pdf", "a.txt"]),
    ],
)
def test_documents_are_chosen_by_id_and_pattern(
    documents: list[str], printed: list[str], results: Path, tmp_path: Path
) -> None:
    result = forked(tmp_path, "show", str(results), *documents, "--format", "md")
    assert [line[2:] for line in result.out.splitlines() if line.startswith("# ")] == printed


@pytest.mark.parametrize(
    ("output", "format"), [("out.md", None), ("out", "md"), ("out/", None), ("out.txt", "jsonl")]
)
def test_what_output_named_leads_to_the_records(
    output: str, format: str | None, tmp_path: Path
) -> None:
    path = str(tmp_path / output) + "/" * output.endswith("/")
    with ResultFiles(Destination.of(path, format), ["b.pdf"]) as files:
        files.start()
        files.add(RECORDS[1])
    assert forked(tmp_path, "show", path).out == "b.pdf\n=====\n\nOf b.\n"


def test_an_id_is_no_pattern_if_there_is_such_a_document(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ids = ["a[1].txt", "a1.txt"]
    path.write_text("".join(f"{json.dumps({**RECORDS[0], 'id': id})}\n" for id in ids))
    assert "a1.txt" not in forked(tmp_path, "show", str(path), ids[0]).out


def test_records_are_read_while_a_job_replaces_them(results: Path) -> None:
    found = last_records(results, "out", lambda ids: ids)
    assert next(found)["id"] == "b.pdf"
    with Records(results) as records:  # drops the error, and sorts
        records.sort(["b.pdf", "a.txt"])
    assert [record["id"] for record in found] == ["a.txt", "c.pdf"]


def test_a_record_that_is_being_written_is_left_out(results: Path, tmp_path: Path) -> None:
    with results.open("a") as file:
        file.write('{"id": "d", "summ')
    assert "\nd\n" not in forked(tmp_path, "show", str(results)).out


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (None, (), "cannot be read: No such file"),
        ("", (), "has no records"),
        ("Dear all,\n", (), "its line 1 is not a summary record"),
        ('{"id": "a", "summary": "A", "versions": {}, "budget": 1}\n', (), "tierforce 0.1"),
        (json.dumps(RECORDS[0]), ("b.txt",), "has no record of 'b.txt': it has a.txt."),
        (json.dumps(RECORDS[0]), ("--format", "pdf"), "--format pdf is not known"),
    ],
)
def test_unsuitable_file_is_one_line(
    content: str | None, more: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "out.jsonl").write_text(content)
    assert words in refused(forked(tmp_path, "show", str(tmp_path / "out.jsonl"), *more))
