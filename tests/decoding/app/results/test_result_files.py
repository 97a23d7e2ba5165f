"""Results are in the order of the input, in formats to read too, however often a job is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.results.views import file_names
from offload.errors import TierForceError
from support.commands import records


def record(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "summary": f"Of {id}.", "versions": {}, "max_new_tokens": 9, **more}


def failure(id: str) -> dict[str, Any]:
    return {"id": id, "error": "it is empty.", "kind": "InvalidRequestError", "versions": {}}


def write(output: str, ids: Sequence[str], *content: dict[str, Any], ends: bool = True) -> None:
    """Write records as a job does; without `ends`, as if it were killed."""
    with ResultFiles(Destination.of(output), ids) as files:
        files.start([each["id"] for each in content])
        for each in content:
            files.add(each)
        if ends:
            files.finish()


@pytest.mark.parametrize(
    ("output", "format", "found", "records"),
    [
        ("out.jsonl", None, "jsonl", "out.jsonl"),
        ("out", None, "jsonl", "out"),
        ("out.json", None, "jsonl", "out.json"),
        ("out.md", None, "md", "out.jsonl"),
        ("a/out.v2.TXT", None, "txt", "a/out.v2.jsonl"),
        ("out", "md", "md", "out.jsonl"),
        ("out.v2", "md", "md", "out.v2.jsonl"),
        ("out.md", "jsonl", "jsonl", "out.md"),
        ("out/", None, "md", "out/records.jsonl"),
        ("out.jsonl/", "txt", "txt", "out.jsonl/records.jsonl"),
    ],
)
def test_destination(output: str, format: str | None, found: str, records: str) -> None:
    destination = Destination.of(output, format)
    assert (destination.format, destination.records) == (found, Path(records))
    assert destination.is_folder == output.endswith("/")


@pytest.mark.parametrize("name", ["out.md", "out.txt"])
def test_file_has_results_as_they_finish_and_then_in_order(name: str, tmp_path: Path) -> None:
    path, ids = tmp_path / name, ["a", "b", "c", "d"]

    def order() -> list[str]:
        text = path.read_text()
        return sorted(
            (id for id in ids if f"Of {id}." in text), key=lambda id: text.index(f"Of {id}.")
        )

    write(str(path), ids, record("d"), record("b"), ends=False)
    assert order() == ["d", "b"]
    assert [each["id"] for each in records(tmp_path / "out.jsonl")] == ["d", "b"]
    write(str(path), ids, failure("c"), record("a"), ends=False)
    assert order() == ["b", "d", "a"]
    write(str(path), ids, failure("c"))
    assert order() == ["a", "b", "d"]
    assert path.read_text().count("Failed:") == 1
    assert [each["id"] for each in records(tmp_path / "out.jsonl")] == ids
    assert {each.name for each in tmp_path.iterdir()} == {"out.jsonl", name}


def test_file_has_the_last_results_of_the_documents_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "out.md"
    write(str(path), ["a", "b"], record("a"), record("b"))
    write(str(path), ["c", "a"], record("a", summary="Better."), record("c"))
    text = path.read_text()
    assert text.index("Of c.") < text.index("Better.")
    assert "Of a." not in text
    assert "Of b." not in text
    found = [each["summary"] for each in records(tmp_path / "out.jsonl")]
    assert found == ["Of a.", "Of b.", "Of c.", "Better."]


def test_another_format_is_written_from_the_same_records(tmp_path: Path) -> None:
    write(f"{tmp_path / 'out.jsonl'}", ["a"], record("a"))
    write(f"{tmp_path / 'out.md'}", ["a"])
    write(f"{tmp_path / 'out.txt'}", ["a"])
    assert (tmp_path / "out.md").read_text().startswith("<!-- Written by tierforce.")
    assert (tmp_path / "out.txt").read_text().endswith("\n\n\na\n=\n\nOf a.\n")


def test_folder_has_a_file_for_each_document(tmp_path: Path) -> None:
    folder, ids = tmp_path / "new/out", ["b.txt", "sub/a.pdf", "c"]
    write(f"{folder}/", ids, record("sub/a.pdf"), record("b.txt"), failure("c"))
    assert (folder / "sub/a.pdf.md").read_text() == "# sub/a.pdf\n\nOf sub/a.pdf.\n"
    assert "Failed: it is empty." in (folder / "c.md").read_text().replace("*", "")
    assert [each["id"] for each in records(folder / "records.jsonl")] == ids
    (folder / "b.txt.md").write_text("edited")
    (folder / "sub/a.pdf.md").unlink()
    write(str(folder), ids, record("c"))  # the folder exists now
    assert (folder / "c.md").read_text() == "# c\n\nOf c.\n"
    assert (folder / "b.txt.md").read_text() == "edited"
    assert (folder / "sub/a.pdf.md").exists()
    assert not list(folder.rglob("*.repair"))


def test_folder_of_json(tmp_path: Path) -> None:
    destination = Destination.of(f"{tmp_path / 'out'}/", "jsonl")
    with ResultFiles(destination, ["a"]) as files:
        files.start(["a"])
        files.add(record("a"))
    assert json.loads((tmp_path / "out/a.json").read_text()) == record("a")


def test_no_result_of_other_settings_is_left_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"{tmp_path}/out/", ["a"], record("a"))
    with ResultFiles(Destination.of(f"{tmp_path}/out/"), ["a"]) as files:
        files.start(["a"])
        monkeypatch.setattr("decoding.app.results.views.FolderView.add", lambda *_: None)  # a kill
        files.add(record("a", summary="Better."))
    assert not (tmp_path / "out/a.md").exists()
    monkeypatch.undo()
    write(f"{tmp_path}/out/", ["a"])
    assert "Better." in (tmp_path / "out/a.md").read_text()


def test_a_result_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    folder = "/".join(["n" * 190] * 30)  # longer than any path
    ids = [f"{folder}/a", "b"]
    with pytest.raises(TierForceError, match=r"cannot be written: File name too long.*are safe"):
        write(f"{tmp_path}/out/", ids, *map(record, ids))
    assert [each["id"] for each in records(tmp_path / "out/records.jsonl")] == ids
    assert (tmp_path / "out/b.md").exists()


def test_files_that_no_job_wrote_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.md").write_text("# Notes")
    with pytest.raises(TierForceError, match="was not written by a job"):
        write(f"{tmp_path}/out.md", ["a"])
    assert {each.name for each in tmp_path.iterdir()} == {"out.md"}
    with pytest.raises(TierForceError, match=r"other files, such as out.md: name a new one"):
        write(str(tmp_path), ["a"])
    (tmp_path / "out.jsonl").write_text('{"id": "a", "text": "input"}\n')
    (tmp_path / "out.md").unlink()
    with pytest.raises(TierForceError, match=r"out.jsonl \(of --output .*out.md\) exists, but"):
        write(f"{tmp_path}/out.md", ["a"])
    os.mkfifo(tmp_path / "pipe.md")
    with pytest.raises(TierForceError, match="is not a regular file"):
        write(f"{tmp_path}/pipe.md", ["a"])
    (tmp_path / "file").touch()
    with pytest.raises(TierForceError, match="cannot be written: File exists"):
        write(f"{tmp_path}/file/", ["a"])


def test_a_job_without_results_leaves_no_file(tmp_path: Path) -> None:
    write(f"{tmp_path}/out.md", ["a"])
    assert not list(tmp_path.iterdir())


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real.md").touch(0o600)
    (tmp_path / "out.md").symlink_to("real.md")
    write(f"{tmp_path}/out.md", ["a"], record("a"))
    assert (tmp_path / "out.md").is_symlink()
    assert "Of a." in (tmp_path / "real.md").read_text()
    assert (tmp_path / "real.md").stat().st_mode & 0o777 == 0o600


def test_the_input_is_not_in_the_folder_of_results(tmp_path: Path) -> None:
    destination = Destination(tmp_path, "md", is_folder=True)
    for source in (tmp_path, tmp_path / "books", tmp_path / "a.txt"):
        with pytest.raises(TierForceError, match="name another folder"):
            destination.check_input(source)
    destination.check_input(tmp_path.parent)


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["a.txt", "b/a.txt"], ["a.txt.md", "b/a.txt.md"]),
        (
            ["../../etc/passwd", "/etc//passwd", "./.."],
            ["etc/passwd.md", "etc_passwd.md", "document.md"],
        ),
        (["A", "a", "a (2)"], ["A.md", "a (2).md", "a (2) (2).md"]),
        (["a", "a.md/b"], ["a.md", "a.md_b.md"]),
        (["a.md/b", "a"], ["a.md/b.md", "a (2).md"]),
        (["two\nlines", "\ud800"], ["two\\nlines.md", "\\ud800.md"]),
    ],
)
def test_file_names_are_different_and_below_the_folder(ids: list[str], names: list[str]) -> None:
    assert [str(name) for name in file_names(ids, ".md").values()] == names


def test_long_names_are_shorter_and_different() -> None:
    ids = [f"https:{'ü' * 300}{number}" for number in range(3)]
    names = [str(name) for name in file_names(ids, ".json").values()]
    assert len(set(names)) == 3
    assert all(len(name.encode()) <= 210 for name in names)
