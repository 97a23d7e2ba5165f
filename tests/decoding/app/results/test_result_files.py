"""Results are in the order of the input, in formats to read too, however often a job is killed."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from decoding.app.results import views
from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.results.views import file_names
from offload.errors import TierForceError
from support.batches import answer
from support.commands import records


def record(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "summary": f"Of {id}.", "versions": {}, "max_new_tokens": 9, **more}


def failure(id: str) -> dict[str, Any]:
    return {"id": id, "error": "it is empty.", "kind": "InvalidRequestError", "versions": {}}


def write(output: str, ids: Sequence[str], *content: dict[str, Any], ends: bool = True) -> None:
    """Write records as a job does; without `ends`, as if it were killed."""
    with ResultFiles(Destination.of(output), ids) as files:
        files.start()
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


def test_standard_output_is_no_destination() -> None:
    with pytest.raises(TierForceError, match="which `tierforce show` prints: name one"):
        Destination.of("-")


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
    write(f"{tmp_path / 'out.jsonl'}", ["a"], record("a", summary="Better."))
    for name in ("out.md", "out.txt"):
        write(f"{tmp_path / name}", ["a"])
        assert "Better." in (tmp_path / name).read_text()


def content(path: Path) -> str:
    """Return what a file of a folder of results has below its mark."""
    mark, text = path.read_text().split("\n\n", 1)
    assert mark.startswith("<!-- Written by tierforce.")
    return text


def test_folder_has_a_file_for_each_document(tmp_path: Path) -> None:
    folder, ids = tmp_path / "new/out", ["b.txt", "sub/a.pdf", "c"]
    write(f"{folder}/", ids, record("sub/a.pdf"), record("b.txt"), failure("c"))
    assert content(folder / "sub/a.pdf.md") == "# sub/a.pdf\n\nOf sub/a.pdf.\n"
    assert content(folder / "c.md") == "# c\n\n**Failed:** it is empty.\n"
    assert [each["id"] for each in records(folder / "records.jsonl")] == ids
    (folder / "sub/a.pdf.md").unlink()
    unchanged = (folder / "b.txt.md").stat().st_ino
    write(str(folder), ids, record("c"))  # the folder exists now
    assert content(folder / "c.md") == "# c\n\nOf c.\n"
    assert content(folder / "sub/a.pdf.md") == "# sub/a.pdf\n\nOf sub/a.pdf.\n"
    assert (folder / "b.txt.md").stat().st_ino == unchanged
    assert not list(folder.rglob(".*"))


def test_folder_of_json(tmp_path: Path) -> None:
    destination = Destination.of(f"{tmp_path / 'out'}/", "jsonl")
    for _ in range(2):
        with ResultFiles(destination, ["a"]) as files:
            files.start()
            files.add(record("a"))
    assert json.loads((tmp_path / "out/a.json").read_text()) == record("a")


def test_results_in_a_folder_are_those_of_the_last_job(tmp_path: Path) -> None:
    """Also after jobs with another format, or another input, whose names differ."""
    output = f"{tmp_path}/out/"
    write(output, ["/x", "x"], record("/x"), record("x"))
    write(f"{output}records.jsonl", ["x"], record("x", summary="Better."))
    write(output, ["x"])
    assert content(tmp_path / "out/x.md") == "# x\n\nBetter.\n"
    write(output, ["x"], failure("x"))
    write(output, ["x"])
    assert "Better." in content(tmp_path / "out/x.md")


def test_no_result_of_another_job_is_left_by_a_kill(tmp_path: Path) -> None:
    """Not under the name of another document, either."""
    write(f"{tmp_path}/out/", ["Emma"], record("Emma"))
    files = ResultFiles(Destination.of(f"{tmp_path}/out/"), ["EMMA", "Emma"])
    files.start()  # and the job is killed
    assert not (tmp_path / "out/EMMA.md").exists()
    assert content(tmp_path / "out/Emma (2).md") == "# Emma\n\nOf Emma.\n"
    del files
    gc.collect()
    ResultFiles(Destination.of(f"{tmp_path}/out/"), ["EMMA"]).start()
    assert not (tmp_path / "out/EMMA.md").exists()


@pytest.mark.parametrize("output", ["out.md", "out.txt", "out/"])
def test_results_stay_until_others_replace_them(output: str, tmp_path: Path) -> None:
    """A job with other options that is killed early takes none of them away."""
    path = f"{tmp_path}/{output}"

    def shows(text: str) -> bool:
        own = contents(tmp_path).items()
        return any(text in each for name, each in own if "jsonl" not in name)

    write(path, ["a", "b"], record("a"), record("b"))
    write(path, ["a", "b"], ends=False)
    assert all(map(shows, ("Of a.", "Of b.")))
    write(path, ["a", "b"], record("b", summary="Better."), ends=False)
    assert all(map(shows, ("Of a.", "Better.")))
    write(path, ["a", "b"])
    assert all(map(shows, ("Of a.", "Better.")))
    assert not shows("Of b.")


def test_a_result_that_cannot_be_written_ends_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["a", "b", "c"]
    for id in ("a", "c"):
        (tmp_path / f"out/.{id}.md.tierforce").mkdir(parents=True)
    match = r"cannot be written: its copy .* \(.*/.a.md.tierforce\). The records .* are safe"
    with pytest.raises(TierForceError, match=match):
        write(f"{tmp_path}/out/", ids, *map(record, ids))
    assert capsys.readouterr().err.count("warning:") == 1
    assert [each["id"] for each in records(tmp_path / "out/records.jsonl")] == ids
    assert (tmp_path / "out/b.md").exists()


def test_a_result_that_is_written_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ResultFiles(Destination.of(f"{tmp_path}/out.md"), ["a", "b"]) as files:
        files.start()
        before = (tmp_path / "out.md").read_text()

        def write_in_part(file: FileIO, content: bytes) -> None:
            file.write(content[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("decoding.app.results.views.write_all", write_in_part)
            files.add(record("a"))
        assert (tmp_path / "out.md").read_text() == before
        files.add(record("b"))
        assert (tmp_path / "out.md").read_text() == f"{before}\n# b\n\nOf b.\n"
        files.finish()
    assert "# a" in (tmp_path / "out.md").read_text()


def test_files_that_no_job_wrote_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.md").write_text("# Notes")
    with pytest.raises(TierForceError, match="is no md file that a job wrote"):
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
    with pytest.raises(TierForceError, match="cannot be written: Not a directory"):
        write(f"{tmp_path}/file/", ["a"])
    with pytest.raises(TierForceError, match="cannot be written: File name too long"):
        write(f"{tmp_path}/{'n' * 300}.md", ["a"])


def test_files_that_no_job_wrote_are_left_alone_in_folders_of_results(tmp_path: Path) -> None:
    write(f"{tmp_path}/out/", ["a"], record("a"))
    (tmp_path / "out/b.md").write_text("# Notes")
    (tmp_path / "out/c.md").symlink_to("b.md")
    for id in ("b", "c"):
        with pytest.raises(TierForceError, match=rf"{id}.md exists, and is no md file"):
            write(f"{tmp_path}/out/", ["a", id], record(id))
    (tmp_path / "out/b.json").write_text('{"id": "b", "mine": "precious"}')
    with pytest.raises(TierForceError, match="is no jsonl file that a job"):
        ResultFiles(Destination.of(f"{tmp_path}/out/", "jsonl"), ["a", "b"])
    with ResultFiles(Destination.of(f"{tmp_path}/out/"), ["a", "d"]) as files:
        files.start()
        (tmp_path / "out/d.md").write_text("# Notes")
        files.add(record("d"))
        with pytest.raises(TierForceError, match="cannot be written"):
            files.finish()
    for name in "bcd":
        assert (tmp_path / f"out/{name}.md").read_text() == "# Notes"


def test_no_result_is_written_through_a_link_out_of_the_folder(tmp_path: Path) -> None:
    write(f"{tmp_path}/out/", ["a"], record("a"))
    (tmp_path / "else").mkdir()
    (tmp_path / "out/sub").symlink_to("../else")
    for id in ("sub/b", "sub/deep/b"):
        with pytest.raises(TierForceError, match="a link leads out of the folder"):
            write(f"{tmp_path}/out/", ["a", id], record(id))
    assert not list((tmp_path / "else").iterdir())


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("precious"), Path.mkdir])
def test_only_what_a_crash_left_is_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("notes")
    copy = tmp_path / ".out.md.tierforce"
    make(copy)
    with pytest.raises(TierForceError, match="its copy is not a regular file"):
        write(f"{tmp_path}/out.md", ["a"], record("a"))
    assert (tmp_path / "precious").read_text() == "notes"
    assert os.path.lexists(copy)
    copy.rmdir() if copy.is_dir() and not copy.is_symlink() else copy.unlink()
    copy.write_text("half a result")
    write(f"{tmp_path}/out.md", ["a"], record("a"))
    assert not copy.exists()


def test_no_copy_is_left_if_the_records_are_damaged(tmp_path: Path) -> None:
    with ResultFiles(Destination.of(f"{tmp_path}/out.md"), ["a"]) as files:
        files.start()
        files.add(record("a"))
        with (tmp_path / "out.jsonl").open("a") as file:
            file.write("Dear all,\n")
        with pytest.raises(TierForceError, match="line 2 is not a summary record"):
            files.finish()
        assert {each.name for each in tmp_path.iterdir()} == {"out.md", "out.jsonl"}
    with pytest.raises(TierForceError) as first:
        write(f"{tmp_path}/out.md", ["a"])
    with pytest.raises(TierForceError, match="line 2 is not") as second:  # not locked by the first
        write(f"{tmp_path}/out.md", ["a"])
    assert first.value is not second.value


def test_a_file_is_written_by_one_job_at_a_time(tmp_path: Path) -> None:
    write(f"{tmp_path}/out.md", ["a"], record("a"))
    (tmp_path / "link.md").symlink_to("out.md")
    with ResultFiles(Destination.of(f"{tmp_path}/out.md"), ["a"]) as files:
        for _ in range(2):
            with pytest.raises(TierForceError, match="is being written by another job"):
                write(f"{tmp_path}/link.md", ["a"])
            files.start()
    (tmp_path / "new.md").touch()
    with (
        ResultFiles(Destination.of(f"{tmp_path}/new.md", "jsonl"), ["a"]),
        pytest.raises(TierForceError, match="is being written by another job"),
    ):
        write(f"{tmp_path}/new.md", ["a"])


def test_records_are_no_link_to_their_results(tmp_path: Path) -> None:
    write(f"{tmp_path}/out.jsonl", ["a"], record("a"))
    (tmp_path / "out.md").symlink_to("out.jsonl")
    with pytest.raises(TierForceError, match="own records: name another file"):
        write(f"{tmp_path}/out.md", ["a"])
    assert records(tmp_path / "out.jsonl") == [record("a")]


def test_results_without_their_records_are_left_alone(tmp_path: Path) -> None:
    write(f"{tmp_path}/out.md", ["a"], record("a"))
    before = (tmp_path / "out.md").read_text()
    for exists in (True, False):
        (tmp_path / "out.jsonl").write_text("") if exists else (tmp_path / "out.jsonl").unlink()
        with pytest.raises(TierForceError, match="are missing: choose another file"):
            write(f"{tmp_path}/out.md", ["a"])
        assert (tmp_path / "out.md").read_text() == before
        assert (tmp_path / "out.jsonl").exists() == exists
    write(f"{tmp_path}/out/", ["a"], record("a"))
    (tmp_path / "out/records.jsonl").write_text("")
    with pytest.raises(TierForceError, match="are missing: choose another file"):
        write(f"{tmp_path}/out/", ["a"])
    assert (tmp_path / "out/a.md").exists()


def test_a_job_without_results_leaves_no_file(tmp_path: Path) -> None:
    write(f"{tmp_path}/out.md", ["a"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "out.md").touch()
    write(f"{tmp_path}/out.md", ["a"])
    assert (tmp_path / "out.md").read_text() == ""
    (tmp_path / "out.md").unlink()
    write(f"{tmp_path}/some/folder/", ["a"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "some").mkdir()
    write(f"{tmp_path}/some/folder/", ["a"])
    assert [each.name for each in tmp_path.rglob("*")] == ["some"]


def test_answers_about_parts_without_a_record_are_found_in_a_folder(tmp_path: Path) -> None:
    with ResultFiles(Destination.of(f"{tmp_path}/out/"), ["a"]) as files:
        files.records.parts.add("1", "a", answer("one"))
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"records.jsonl.parts"}
    with ResultFiles(Destination.of(f"{tmp_path}/out/"), ["a"]) as files:
        assert files.records.parts.get("1", "a") is not None


class Killed(BaseException):
    """A kill, as far as files are concerned: what follows does not happen."""


class Kill:
    """Kills a job before one of the calls by which it changes files."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: int):
        """`steps` calls happen."""
        self.left = steps
        for owner, names in ((os, ("fsync", "fchmod")), (Path, ("replace", "unlink", "mkdir"))):
            for name in names:
                patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Killed
            return call(*arguments, **options)

        return step


def command(output: str, digest: str) -> None:
    """Do what a command does that has not been finished yet. The first one fails for document b."""
    files = ResultFiles(Destination.of(output), ["a", "b", "c"])  # left open, as by a kill
    finished = files.records.finished
    due = [id for id in "cba" if id not in finished or finished[id].digest != digest]
    files.start()
    for id in due:
        fails = (id, digest) == ("b", "1")
        files.add(failure(id) if fails else record(id, digest=digest, summary=f"{digest}, {id}"))
    files.finish()


def contents(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.mark.parametrize(("output", "count"), [("out.jsonl", 1), ("out.md", 2), ("out/", 4)])
def test_commands_end_with_the_same_results_wherever_they_are_killed(
    output: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes a file is the last one, in turn."""
    gc.collect()
    gc.freeze()  # the collections below see this test's objects only
    for folder, digests in (("1", "1"), ("12", "12")):
        (tmp_path / folder).mkdir()
        for digest in digests:
            command(f"{tmp_path / folder}/{output}", digest)
    assert len(contents(tmp_path / "12")) == count
    for digest, before in (("1", ""), ("2", "1")):
        steps, is_killed = 0, True
        while is_killed:
            folder = tmp_path / f"{before}-{steps}"
            shutil.copytree(tmp_path / before, folder) if before else folder.mkdir()
            path = f"{folder}/{output}"
            with monkeypatch.context() as patch:
                kill = Kill(patch, steps)
                with suppress(Killed):
                    command(path, digest)
                is_killed = kill.left < 0
            gc.collect()  # closes the files of the killed command
            command(path, digest)
            assert contents(folder) == contents(tmp_path / f"{before}{digest}"), steps
            steps += 1
        assert steps > 6


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real.md").touch(0o600)
    (tmp_path / "out.md").symlink_to("real.md")
    write(f"{tmp_path}/out.md", ["a"], record("a"))
    assert (tmp_path / "out.md").is_symlink()
    assert "Of a." in (tmp_path / "real.md").read_text()
    assert (tmp_path / "real.md").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("output", ["out.md", "out/"])
def test_results_are_as_private_as_records(output: str, tmp_path: Path) -> None:
    write(f"{tmp_path}/{output}", ["a"], record("a"))
    destination = Destination.of(f"{tmp_path}/{output}")
    path = tmp_path / "out.md" if output == "out.md" else tmp_path / "out/a.md"
    path.unlink()
    destination.records.chmod(0o600)
    write(f"{tmp_path}/{output}", ["a"])
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_input_is_not_in_the_folder_of_results(tmp_path: Path) -> None:
    destination = Destination(tmp_path, "md", is_folder=True)
    for source in (tmp_path, tmp_path / "books", tmp_path / "a.txt"):
        with pytest.raises(TierForceError, match="name another"):
            destination.check_input(source)
    destination.check_input(tmp_path.parent)
    destination = Destination.of(f"{tmp_path}/out.md")
    for name in ("out.md", "out.jsonl"):
        with pytest.raises(TierForceError, match="would replace --input"):
            destination.check_input(tmp_path / name)
    destination.check_input(tmp_path)


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
        (
            ["Records.jsonl/a", "records.jsonl.parts/b"],
            ["Records.jsonl_a.md", "records.jsonl.parts_b.md"],
        ),
    ],
)
def test_file_names_are_different_and_below_the_folder(ids: list[str], names: list[str]) -> None:
    assert [str(name) for name in file_names(ids, ".md").values()] == names


def test_many_ids_of_one_name_are_compared_a_few_times_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, parents = list[str](), views._parents

    def counted(name: str) -> list[str]:
        calls.append(name)
        return parents(name)

    monkeypatch.setattr(views, "_parents", counted)
    ids = [f"a{'/' * (1 + number % 2000)}{'./' * (number // 2000)}b" for number in range(20_000)]
    assert len(set(file_names(ids, ".md").values())) == 20_000
    assert len(calls) <= 5 * len(ids)


@pytest.mark.parametrize("id", ["/".join(["n" * 190] * 30), "a/" * 2000 + "b"])
def test_path_that_would_be_too_long_has_no_folders(id: str) -> None:
    (name,) = file_names([id], ".md").values()
    assert "/" not in name
    assert len(name) <= 210


def test_long_names_are_shorter_and_different() -> None:
    ids = [f"https:{'ü' * 300}{number}" for number in range(3)]
    names = [str(name) for name in file_names(ids, ".json").values()]
    assert len(set(names)) == 3
    assert all(len(name.encode()) <= 210 for name in names)
