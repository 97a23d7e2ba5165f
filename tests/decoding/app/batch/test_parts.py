"""Documents longer than the context: their parts and merges, in records and after interruptions."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.app.batch.documents_in_progress import DocumentsInProgress
from decoding.app.batch.job import BatchJob
from decoding.app.batch.report import Report
from decoding.app.documents.document import DocumentText, Identity
from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.results.part_answers import PartAnswers
from decoding.app.results.records import Records
from decoding.app.terminal.progress import Display
from decoding.speculation.sampling import Sampling
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder
from offload.errors import TierForceError
from support.batches import answer, exit_after_answers
from support.commands import TARGET, Finished, refused, summarized
from support.prompts import write_passages
from support.slow import slow_except

SHORT = ("--max-new-tokens", "12", "--context", "400", "--instruction", "Sum up.")
WHOLE, LONG = "whole.txt", "long.txt"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a document of several parts, and one that fits."""
    return write_passages(tmp_path_factory.mktemp("in"), {LONG: 1200, WHOLE: 100})


def summarize(
    folder: Path, source: Path, *more: str, before: Any = None
) -> tuple[Finished, dict[str, Any]]:
    """Run the command; return its result and the records by id."""
    return summarized(folder, source, *SHORT, *more, before=before)


def test_record_has_all_parts_and_each_summary_is_that_of_its_part_alone(
    source: Path, tmp_path: Path
) -> None:
    result, found = summarize(tmp_path, source)
    assert result.code == 0, result.err
    assert "1 of them in parts" in result.err
    record, text = found[LONG], (source / LONG).read_text()
    assert record["truncated_tokens"] == 0
    spans = [part["characters"] for part in record["parts"]]
    assert "".join(text[start:end] for start, end in spans) == text
    assert len(spans) > 2
    assert record["prompt_tokens"] == sum(
        each["prompt_tokens"] for each in (*record["parts"], *record["merges"])
    )
    assert record["merges"][-1]["parts"] == [1, len(spans)]
    assert "parts" not in found[WHOLE]
    # each part as a document, and their summaries as another one
    alone = tmp_path / "alone"
    alone.mkdir()
    for number, (start, end) in enumerate(spans):
        (alone / f"{number}.txt").write_text(text[start:end])
    (tmp_path / "a").mkdir()
    _, parts = summarize(tmp_path / "a", alone)
    assert [part["summary"] for part in record["parts"]] == [
        parts[f"{number}.txt"]["summary"] for number in range(len(spans))
    ]
    assert not (tmp_path / "out.jsonl.parts").exists()
    again, _ = summarize(tmp_path, source)
    assert "all 2 documents are already finished" in again.err


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_killed_job_goes_on_with_the_part_it_was_at(
    ranks: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    _, expected = summarize(tmp_path / "a", source, "--concurrency", "1")
    count = len(expected[LONG]["parts"])
    kill = partial(exit_after_answers, 2)
    options = ("--concurrency", "1", *ranks)
    for _ in range(2):
        result, found = summarize(tmp_path, source, *options, before=kill)
        assert result.code != 0
        assert LONG not in found
    assert len((tmp_path / "out.jsonl.parts").read_text().splitlines()) == 4
    result, found = summarize(tmp_path, source, *options)
    assert result.code == 0, result.err
    assert [f"part {n} of {count}" in result.err for n in (1, 4, 5)] == [False, False, count > 4]
    for key in ("summary", "digest", "prompt_tokens"):
        assert found[LONG][key] == expected[LONG][key]
    parts = [part["summary"] for part in found[LONG]["parts"]]
    assert parts == [part["summary"] for part in expected[LONG]["parts"]]
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_document_is_summarised_again_if_its_length_is_treated_otherwise(
    source: Path, tmp_path: Path
) -> None:
    cut, found = summarize(tmp_path, source, "--long", "cut")
    assert found[LONG]["truncated_tokens"] > 0
    assert "were dropped" in cut.err
    assert "parts" not in found[LONG]
    for more in ((), ("--merge-instruction", "Merge."), ("--long", "cut")):
        result, found = summarize(tmp_path, source, *more)
        assert "1 finished records" in result.err
        assert "already finished: 1 of 2 documents" in result.err
        assert ("parts" in found[LONG]) == (more != ("--long", "cut"))
        result, _ = summarize(tmp_path, source, *more)
        assert "are already finished: " in result.err


def test_context_without_room_to_merge_is_an_error_record(source: Path, tmp_path: Path) -> None:
    result, found = summarize(tmp_path, source, "--context", "120")
    assert result.code == 1
    assert "too short to merge two answers of 12 tokens" in found[LONG]["error"]
    assert "--context" in found[LONG]["error"]
    assert "summary" in found[WHOLE]


@pytest.mark.parametrize(
    "content", ["notes\n", "notes", '{"id": "a"}\n', '{"digest": "a"}\n', "[1]\n", "{}"]
)
def test_file_that_is_not_of_parts_is_refused(content: str, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.parts"
    path.write_text(content)
    result, found = summarize(tmp_path, source)
    assert "its line 1 is not an answer about a part of a document" in refused(result)
    assert path.read_text() == content
    assert not found
    assert not (tmp_path / "out.jsonl").exists()


def test_link_in_place_of_the_file_is_not_followed(source: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / "out.jsonl.parts").symlink_to(victim)
    result, _ = summarize(tmp_path, source)
    assert "for parts of documents, cannot be read" in refused(result)


def test_parts_file_survives_a_torn_line_and_another_version(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = PartAnswers(path)
    first.add("1", "book", answer("one"))
    first.close()
    (line,) = first.path.read_bytes().splitlines()
    with first.path.open("ab") as file:
        file.write(b"\0\0\n")
        file.write(b'{"digest": "2", "id": "book", "answer": {"summary": "no counts"}}\n')
        for damaged in (b"NaN", b"1e999", b'"two"', b"1" * 400):
            changed = line.replace(b'"new_tokens": 2', b'"new_tokens": ' + damaged)
            file.write(changed.replace(b'"digest": "1"', b'"digest": "2"') + b"\n")
        file.write(b'{"digest": "3", "id": "bo')
    second = PartAnswers(path)
    assert second.get("1", "book") is not None
    assert second.get("2", "book") is None
    second.add("3", "book", answer("three"))
    second.close()
    third = PartAnswers(path)
    found = [third.get(digest, "book") for digest in "13"]
    assert [each and each["summary"] for each in found] == ["one", "three"]
    third.finish("book")
    assert not third.path.exists()


@pytest.mark.parametrize(
    "tail", [b"\0" * 100, b"  ", b'{"dig', b'\0{"digest": "4", "id'], ids=range(4)
)
def test_parts_file_survives_what_a_power_loss_leaves(tail: bytes, tmp_path: Path) -> None:
    for digest in "123":
        answers = PartAnswers(tmp_path / "out.jsonl")
        assert answers.count == int(digest) - 1
        answers.add(digest, "book", answer(digest))
        answers.close()
        with answers.path.open("ab") as file:
            file.write(tail)


@pytest.mark.parametrize("content", ["", "{"])
def test_file_without_answers_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.parts"
    path.write_text(content)
    PartAnswers(tmp_path / "out.jsonl").close()
    assert path.read_text() == content


def test_parts_are_as_private_as_records(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.touch(0o600)
    with Records(output) as records:
        records.parts.add("1", "book", answer("one"))
        assert stat.S_IMODE(records.parts.path.stat().st_mode) == 0o600


def test_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.parts").mkdir()
    with pytest.raises(TierForceError, match=r"out\.jsonl\.parts, for parts of documents, cannot"):
        PartAnswers(tmp_path / "out.jsonl")


def test_name_too_long_for_the_file_matters_only_if_it_is_needed(tmp_path: Path) -> None:
    with Records(tmp_path / ("n" * 252)) as output:
        found: list[dict[str, Any]] = []
        builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), JOB.format, 400, 12)
        progress = DocumentsInProgress(builder, JOB, output.parts, found.append)
        progress.begin("short", DocumentText("Once upon a time.", {}, Identity("1")))
        with pytest.raises(TierForceError, match="cannot be written: File name too long"):
            progress.begin("long", DocumentText("Once upon a time. " * 200, {}, Identity("2")))


def test_progress_counts_answers_on_disk_too(tmp_path: Path) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), JOB.format, 400, 12)
    words = "".join(f"Once upon a time, in {year}. " for year in range(1000, 1100))
    text = DocumentText(words, {}, Identity("2"))
    rounds = list[tuple[Any, ...]]()

    def on_progress(*round: Any) -> None:
        rounds.append(round)

    for answers in (2, None):  # the first job is killed
        with Records(tmp_path / "out.jsonl") as output:
            progress = DocumentsInProgress(builder, JOB, output.parts, lambda _: None, on_progress)
            progress.begin("long", text)
            for work in islice(progress.work(), answers):
                progress.finish(work, answer("Once."))
    count = rounds[0][3]
    assert count > 2
    parts = [("long", 1, finished, count, count) for finished in range(count + 1)]
    assert rounds == [*parts[:3], *parts, ("long", 2, 0, 1, 1), ("long", 2, 1, 1, 1)]


def test_answer_that_another_document_has_too_is_kept(tmp_path: Path) -> None:
    answers = PartAnswers(tmp_path / "out.jsonl")
    for digest in "12":
        answers.add(digest, "book", answer(digest))
    assert answers.get("1", "copy") is not None
    assert answers.count == 2
    answers.finish("book")
    assert answers.count == 1
    assert answers.get("2", "copy") is None
    again = PartAnswers(tmp_path / "out.jsonl")  # after a kill
    again.finish("book")
    assert again.get("1", "copy") is not None
    again.finish("copy")
    assert not again.path.exists()


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))


def test_full_disk_ends_the_job_with_finished_answers_intact(source: Path, tmp_path: Path) -> None:
    document = source / LONG
    result, found = summarize(tmp_path, document, before=_limit_file_size)
    assert result.code == 1
    assert "for parts of documents, cannot be written: File too large." in result.err
    assert "Finished records are safe." in result.err
    assert LONG not in found
    kept = PartAnswers(tmp_path / "out.jsonl").count
    assert kept > 0
    result, found = summarize(tmp_path, document)
    assert result.code == 0, result.err
    assert len(re.findall(r"long.txt, part \d+ of", result.err)) == len(found[LONG]["parts"]) - kept


def test_answers_of_other_settings_are_not_used(source: Path, tmp_path: Path) -> None:
    """Their prompts are the same."""
    summarize(tmp_path, source, "--concurrency", "1", before=partial(exit_after_answers, 2))
    result, found = summarize(tmp_path, source, "--temperature", "0.5")
    assert result.code == 0, result.err
    parts = set(re.findall(r"long.txt, part (\d+) of", result.err))
    assert len(parts) == len(found[LONG]["parts"])


def _exit_before_close() -> None:
    """Let the job be killed when all records are on disk."""
    PartAnswers.close = lambda self: os._exit(9)  # type: ignore[method-assign]


def test_answers_are_deleted_after_a_kill_between_record_and_close(
    source: Path, tmp_path: Path
) -> None:
    result, found = summarize(tmp_path, source, before=_exit_before_close)
    assert (result.code, len(found)) == (9, 2)
    assert (tmp_path / "out.jsonl.parts").exists()
    result, _ = summarize(tmp_path, source)
    assert "are already finished: " in result.err
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_answers_of_a_failed_document_are_kept(tmp_path: Path) -> None:
    failed = {"id": "book", "error": "no room", "kind": "TierForceError", "versions": {}}
    with Records(tmp_path / "out.jsonl") as output:
        output.parts.add("1", "book", answer("one"))
        output.append(failed)
    with Records(tmp_path / "out.jsonl") as output:
        assert output.parts.get("1", "book") is not None
        output.append({"id": "book", "summary": "all", "versions": {}})
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_interrupt_counts_answers_about_unfinished_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    destination = Destination(tmp_path / "out.jsonl")
    with ResultFiles(destination, []) as files, Display(2, sys.stderr) as display:
        report, output = Report([], [], files, display), files.records
        for digest, document in (("1", "a"), ("2", "a"), ("3", "b")):
            output.parts.add(digest, document, answer(digest))
        output.append({"id": "a", "summary": "all", "versions": {}})
        report.interrupt("SIGINT")
        assert "1 finished record is safe" in capsys.readouterr().err
        output.append({"id": "b", "summary": "all", "versions": {}})
        report.interrupt("SIGINT")
        assert "answers about parts" not in capsys.readouterr().err


def test_instructions_for_parts_may_be_shorter_or_too_long(source: Path, tmp_path: Path) -> None:
    """A document that would fit with the instruction for parts has two parts nevertheless."""
    alone = tmp_path / "in"
    alone.mkdir()
    (alone / LONG).write_text((source / WHOLE).read_text())
    long = ("--instruction", "Do it with care. " * 70, "--part-instruction", "Sum up.")
    merge = ("--merge-instruction", "Merge.")
    result, found = summarize(tmp_path, alone, *long, *merge)
    assert result.code == 0, result.err
    assert len(found[LONG]["parts"]) == 2
    too_long = ("--part-instruction", "Do it with care. " * 200, *merge)
    result, found = summarize(tmp_path, source, *too_long)
    assert result.code == 1
    assert "Shorten it (--part-instruction)" in found[LONG]["error"]
    useless, _ = summarize(tmp_path, source, "--long", "cut", *merge)
    assert "leave them out with --long cut" in refused(useless)


SETTINGS = 12, 400, "float32", None, Sampling(0.0)
JOB = BatchJob("model", None, "weights", Instructions(), PromptFormat(), *SETTINGS)


def progress_of(
    folder: Path, found: list[dict[str, Any]], context: int = 400
) -> DocumentsInProgress:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), JOB.format, context, 12)
    return DocumentsInProgress(builder, JOB, PartAnswers(folder / "out.jsonl"), found.append)


def test_merges_come_before_the_parts_of_other_documents(source: Path, tmp_path: Path) -> None:
    """A record is on disk as early as can be."""
    found: list[dict[str, Any]] = []
    progress, text = progress_of(tmp_path, found), (source / LONG).read_text()
    progress.begin("a", DocumentText(text, {}, Identity("1")))
    progress.begin("b", DocumentText(text + text, {}, Identity("2")))
    names = list[str]()
    while progress:
        work = next(progress.work())
        names.append(work.name)
        progress.finish(work, answer(f"answer {len(names)}"))
    assert [record["id"] for record in found] == ["a", "b"]
    assert [name.partition(",")[0] for name in names] == sorted(
        name.partition(",")[0] for name in names
    )
    assert "merge" in names[len(found[0]["parts"])]


def test_whole_document_does_not_take_the_answer_about_a_part(source: Path, tmp_path: Path) -> None:
    """Its record has more counts."""
    found: list[dict[str, Any]] = []
    progress, text = progress_of(tmp_path, found), (source / LONG).read_text()
    progress.begin("book", DocumentText(text, {}, Identity("1")))
    first = next(progress.work())
    progress.finish(first, answer("one"))
    chapter = text[: (first.task.characters or (0, 0))[1]]
    progress.begin("chapter", DocumentText(chapter, {}, Identity("2")))
    works = {work.name: work for work in progress.work()}
    assert works["chapter"].digest == first.digest


def test_failed_part_ends_its_document_and_later_answers_are_kept(
    source: Path, tmp_path: Path
) -> None:
    found: list[dict[str, Any]] = []
    progress = progress_of(tmp_path, found)
    progress.begin("a", DocumentText((source / LONG).read_text(), {}, Identity("1")))
    works = list(progress.work())
    progress.fail(works[1], "InsufficientMemoryError", "use a longer `context`.")
    progress.finish(works[0], answer("one"))
    progress.fail(works[2], "InsufficientMemoryError", "again")
    assert not progress
    (record,) = found
    assert record["error"] == f"part 2 of {len(works)}: use a longer --context."
    lines = (tmp_path / "out.jsonl.parts").read_text().splitlines()
    assert [json.loads(line)["answer"]["summary"] for line in lines] == ["one"]
