"""Questions are answered after one prefill of their document, and lines of JSON may have their own
instructions.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.batches import exit_after_answers
from support.commands import (
    GREEDY_FP32,
    MODELS,
    Finished,
    forked,
    refused,
    summarized,
)
from support.prompts import write_passages
from support.slow import slow_except

NEW = ("--max-new-tokens", "12")
QUESTIONS = ["Who?", "What became of the man who is named first, and why?", "Why not?"]
WHOLE, LONG = "whole.txt", "long.txt"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two documents, one of which has several parts in a context of 700."""
    return write_passages(tmp_path_factory.mktemp("in"), {LONG: 1600, WHOLE: 500})


def run(
    folder: Path, source: Path, *more: str, before: Any = None
) -> tuple[Finished, dict[str, Any]]:
    """Run the command; return its result and the records by id."""
    folder.mkdir(exist_ok=True)
    return summarized(folder, source, *NEW, *more, before=before)


def questions(folder: Path, *lines: str) -> tuple[str, str]:
    """Return the option that names a file of questions."""
    path = folder / "questions.txt"
    path.write_text("\n".join(lines or QUESTIONS))
    return "--questions", str(path)


def answers(record: dict[str, Any]) -> dict[str, str]:
    return {each["question"]: each["answer"] for each in record["answers"]}


@pytest.mark.parametrize(
    "options",
    slow_except(
        [
            pytest.param(("--concurrency", "1")),
            pytest.param(("--concurrency", "1", "--gpu-kv-layers", "0", "--mode", "hierarchical")),
            pytest.param(("--concurrency", "3")),
            pytest.param(("--concurrency", "1", "--gpus", "2")),
        ],
        2,
    ),
    ids=["device", "host", "together", "ranks"],
)
def test_document_is_prefilled_once_and_answers_are_those_of_questions_alone(
    options: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    result, found = run(tmp_path, source, *questions(tmp_path), *options)
    assert result.code == 0, result.err
    assert "3 questions about each document" in result.err
    record = found[WHOLE]
    assert [each["question"] for each in record["answers"]] == QUESTIONS
    assert "summary" not in record
    for index, each in enumerate(record["answers"]):
        prefilled = each["prompt_tokens"] - each["reused_tokens"]
        assert (prefilled < 100) == (index > 0), record["answers"]
    assert record["prompt_tokens"] == sum(each["prompt_tokens"] for each in record["answers"])
    assert record["reused_tokens"] == sum(each["reused_tokens"] for each in record["answers"])
    for index, question in enumerate(QUESTIONS[:2]):
        _, alone = run(tmp_path / f"{index}", source, "--instruction", question)
        assert answers(record)[question] == alone[WHOLE]["summary"]
        assert answers(found[LONG])[question] == alone[LONG]["summary"]


def test_parts_are_asked_all_questions_and_answers_merged(source: Path, tmp_path: Path) -> None:
    short = ("--context", "700")
    result, found = run(tmp_path, source, *questions(tmp_path), *short)
    assert result.code == 0, result.err
    text = (source / LONG).read_text()
    for question, each in zip(QUESTIONS, found[LONG]["answers"], strict=True):
        assert each["question"] == question
        spans = [part["characters"] for part in each["parts"]]
        assert len(spans) > 2
        assert "".join(text[start:end] for start, end in spans) == text
        assert each["merges"][-1]["parts"] == [1, len(spans)]
    first, *others = found[LONG]["answers"]
    assert all(part["reused_tokens"] < 50 for part in first["parts"])
    assert all(part["reused_tokens"] > 300 for each in others for part in each["parts"])
    assert "Parts that do not answer it" in found[LONG]["merge_instruction"]
    assert f"part 1 of {len(spans)}, question 3 of 3" in result.err
    assert "parts" not in found[WHOLE]["answers"][0]
    again, _ = run(tmp_path, source, *questions(tmp_path), *short)
    assert "all 2 documents are already finished" in again.err


@pytest.mark.slow
@pytest.mark.parametrize("context", [(), ("--context", "700")], ids=["whole", "parts"])
def test_killed_job_asks_no_question_twice(
    context: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    options = ("--concurrency", "1", *questions(tmp_path), *context)
    _, expected = run(tmp_path / "a", source, *options)
    lines = ""
    for _ in range(2):
        result, found = run(tmp_path, source, *options, before=partial(exit_after_answers, 2))
        assert result.code != 0
        lines += result.err
    result, found = run(tmp_path, source, *options)
    assert result.code == 0, result.err
    asked = re.findall("^.*question . of 3(?=: )", lines + result.err, re.MULTILINE)
    merged = sum(len(each.get("merges", ())) for each in found[LONG]["answers"])
    parts = sum(len(each.get("parts", "x")) for each in found[LONG]["answers"])
    assert len(asked) == len(set(asked)) == merged + parts + len(QUESTIONS)
    assert {id: answers(each) for id, each in found.items()} == {
        id: answers(each) for id, each in expected.items()
    }
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_documents_are_asked_again_if_the_questions_change(source: Path, tmp_path: Path) -> None:
    first, _ = run(tmp_path, source, *questions(tmp_path, "", "  Who?  ", ""))
    assert first.code == 0, first.err
    assert "1 question about each document" in first.err
    same, _ = run(tmp_path, source, *questions(tmp_path, "Who?"))
    assert "are already finished: " in same.err
    other, found = run(tmp_path, source, *questions(tmp_path, "Who?", "Why?"))
    assert "2 finished records" in other.err
    assert list(answers(found[WHOLE])) == ["Who?", "Why?"]
    summary, found = run(tmp_path, source)
    assert "2 finished records" in summary.err
    assert "summary" in found[WHOLE]


def test_document_is_cut_for_all_questions_alike(source: Path, tmp_path: Path) -> None:
    cut = ("--context", "700", "--long", "cut")
    result, found = run(tmp_path, source, *questions(tmp_path), *cut)
    assert result.code == 0, result.err
    assert "1 of them truncated" in result.err
    record = found[LONG]
    dropped = [each["truncated_tokens"] for each in record["answers"]]
    assert record["truncated_tokens"] == max(dropped) > 800
    assert max(dropped) - min(dropped) < 30
    assert [each["prompt_tokens"] for each in record["answers"]] == [688] * 3
    assert [each["reused_tokens"] > 600 for each in record["answers"]] == [False, True, True]


def test_lines_have_instructions_or_questions_of_their_own(tmp_path: Path) -> None:
    text = "It was the best of times, it was the worst of times. " * 5
    lines: list[dict[str, Any]] = [
        {"id": "plain", "text": text, "instruction": None},
        {"id": "own", "text": text, "instruction": "Translate.", "title": "A Tale"},
        {"id": "asked", "text": text, "questions": ["Who?", "Why?"], "instrution": "x", "title": 1},
        {"id": "one", "text": text, "questions": ["Who?"]},
        {"id": "both", "text": text, "instruction": "Sum up.", "questions": ["Who?"]},
        {"id": "blank", "text": text, "instruction": " "},
        {"id": "none", "text": text, "questions": []},
        {"id": "number", "text": text, "questions": [1]},
        {"id": "string", "text": text, "questions": "Who?"},
        {"id": "half", "text": text, "instruction": "\ud800"},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    result, found = run(tmp_path, source, "--instruction", "Sum up.")
    assert result.code == 1
    assert 'fields that are not read: "title" (2 lines), "instrution" (1 line).' in result.err
    assert found["plain"]["instruction"] == "Sum up."
    assert found["own"]["instruction"] == "Translate."
    assert list(answers(found["asked"])) == ["Who?", "Why?"]
    assert list(answers(found["one"])) == ["Who?"]
    assert "instruction" not in found["asked"]
    for id, reason in (
        ("both", 'has both "instruction" and "questions"'),
        ("blank", '"instruction" must be a string that is not blank'),
        ("none", '"questions" must be a list of strings that are not blank'),
        ("number", '"questions" must be a list of strings'),
        ("string", '"questions" must be a list of strings'),
        ("half", "half a character"),
    ):
        assert reason in found[id]["error"]
    hostile = tmp_path / "hostile.jsonl"
    fields = {f"{number}\x1b" * 500: 1 for number in range(150)}
    hostile.write_text(json.dumps({"id": 1, "text": "", **fields}))
    result, _ = run(tmp_path / "h", hostile)
    assert len(result.err) < 20_000
    assert "\x1b" not in result.err
    alone = tmp_path / "alone.jsonl"
    alone.write_text(json.dumps({"id": "own", "text": text}))
    _, other = run(tmp_path / "a", alone, "--instruction", "Translate.")
    assert other["own"]["digest"] == found["own"]["digest"]
    assert other["own"]["summary"] == found["own"]["summary"]
    # an instruction of a line's own does not depend on the job's
    result, _ = run(tmp_path, source, "--instruction", "Be brief.")
    assert "1 finished records" in result.err
    assert "already finished: " in result.err


def test_files_of_questions_and_templates_that_cannot_be_used(source: Path, tmp_path: Path) -> None:
    asked = questions(tmp_path)
    both, _ = run(tmp_path, source, *asked, "--instruction", "Sum up.")
    assert "--questions are asked in place of --instruction" in refused(both)
    missing, _ = run(tmp_path, source, "--questions", str(tmp_path / "none.txt"))
    assert "No such file" in refused(missing)
    blank, _ = run(tmp_path, source, *questions(tmp_path, " ", ""))
    assert "questions.txt: the document is empty" in refused(blank)
    template = tmp_path / "template.txt"
    for content, reason in (
        ("{document}", "at least once, found 1 and 0 of them"),
        ("{instruction}", "at least once, found 0 and 1 of them"),
        ("{document}{document} {instruction}", "at least once, found 2 and 1 of them"),
    ):
        template.write_text(content)
        result, _ = run(tmp_path, source, "--template", str(template))
        assert reason in refused(result)
    system, _ = run(tmp_path, source, "--system", "Be brief.")
    assert "no chat template: use an instruct model, or leave out --system" in refused(system)
    assert not (tmp_path / "out.jsonl").exists()


def test_template_surrounds_the_document(source: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.html"
    template.write_text("<p>{document}</p> {instruction} And {instruction}\n")
    result, found = run(tmp_path, source, "--template", str(template), "--instruction", "Who?")
    assert result.code == 0, result.err
    assert found[WHOLE]["template"] == "<p>{document}</p> {instruction} And {instruction}"
    alone = tmp_path / "alone.txt"
    alone.write_text(f"<p>{(source / WHOLE).read_text()}</p> Who? And Who?")
    prompt = ("--prompt-file", str(alone), *NEW)
    expected = forked(tmp_path, "generate", *MODELS, *GREEDY_FP32, *prompt)
    assert found[WHOLE]["summary"] == expected.out.strip()
    again, _ = run(tmp_path, source, "--instruction", "Who?")
    assert "2 finished records" in again.err
    template.write_text("{instruction}\n\n{document}")
    before, found = run(tmp_path / "a", source, *questions(tmp_path), "--template", str(template))
    assert "every question prefills its document again" in before.err
    assert all(each["reused_tokens"] < 50 for each in found[WHOLE]["answers"])
