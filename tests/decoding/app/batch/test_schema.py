"""Answers in JSON under a schema: in records, by questions, of parts, and on standard output."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from decoding import GREEDY
from decoding.app.batch.documents_in_progress import DocumentsInProgress
from decoding.app.batch.job import BatchJob
from decoding.app.batch.report import Report, conclude_finished
from decoding.app.documents.document import Document, DocumentText, Identity
from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.terminal.progress import Display
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder
from offload.errors import TierForceError
from support.batches import answer, exit_after_answers
from support.commands import (
    GREEDY_FP32,
    MODELS,
    TARGET,
    Finished,
    forked,
    records,
    refused,
    summarized,
)
from support.prompts import write_passages
from support.slow import slow_except

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["class", "function"]},
        "size": {"type": "number", "minimum": -2.5, "maximum": 9},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
QUESTIONS = ["Who?", "Why?"]
WHOLE, LONG = "whole.txt", "long.txt"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two documents, one of which has parts in a context of 800."""
    return write_passages(tmp_path_factory.mktemp("in"), {LONG: 1500, WHOLE: 300})


def schema(folder: Path, content: Any = SCHEMA) -> tuple[str, str]:
    """Return the option that names a file with a schema."""
    path = folder / "schema.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return "--schema", str(path)


def run(
    folder: Path, source: Path, *more: str, new: int = 120, before: Any = None
) -> tuple[Finished, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    return summarized(folder, source, "--max-new-tokens", str(new), *more, before=before)


def check(answer: str, data: Any) -> None:
    """Fail unless an answer is JSON under the schema, and `data` is its value."""
    jsonschema.validate(data, SCHEMA)
    assert json.loads(answer) == data


@pytest.mark.parametrize(
    "options", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]), ids=["one", "ranks"]
)
def test_records_have_an_answer_under_the_schema_and_its_value(
    options: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    result, found = run(tmp_path, source, *schema(tmp_path), *options)
    assert result.code == 0, result.err
    for record in found.values():
        check(record["summary"], record["data"])
        assert record["finish_reason"] == "stop"
        assert record["schema"] == SCHEMA
    again, _ = run(tmp_path, source, *schema(tmp_path, json.dumps(SCHEMA)))
    assert "all 2 documents are already finished" in again.err
    other, _ = run(tmp_path, source, *schema(tmp_path, {**SCHEMA, "title": "x"}))
    assert "2 finished records" in other.err


@pytest.mark.slow
def test_parts_are_free_and_the_last_merge_is_under_the_schema(
    source: Path, tmp_path: Path
) -> None:
    options = (*schema(tmp_path), "--context", "800")
    result, found = run(tmp_path, source, *options)
    assert result.code == 0, result.err
    record = found[LONG]
    check(record["summary"], record["data"])
    assert len(record["parts"]) > 1
    for part in record["parts"]:
        assert not part["summary"].startswith("{")
    # the schema is in the prompt of the final answer alone
    path = tmp_path / "out.jsonl.parts"
    assert not path.exists()
    killed, _ = run(tmp_path / "a", source, *options, before=partial(exit_after_answers, 2))
    assert killed.code == 9
    other = (*schema(tmp_path, {"enum": ["yes"]}), "--context", "800")
    result, found = run(tmp_path / "a", source, *other)
    assert found[LONG]["data"] == "yes"
    assert [each["summary"] for each in found[LONG]["parts"]] == [
        each["summary"] for each in record["parts"]
    ]
    # two of their answers were on disk
    assert len(re.findall(r"part \d+ of", result.err)) == len(record["parts"]) - 2


@pytest.mark.slow
def test_answers_to_questions_are_under_the_schema_after_a_kill_too(
    source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(QUESTIONS))
    options = ("--questions", str(path), *schema(tmp_path), "--concurrency", "1")
    killed, _ = run(tmp_path, source, *options, before=partial(exit_after_answers, 1))
    assert killed.code == 9
    result, found = run(tmp_path, source, *options)
    assert result.code == 0, result.err
    assert result.err.count("question 1 of 2:") + result.err.count("question 2 of 2:") == 3
    for record in found.values():
        assert [each["question"] for each in record["answers"]] == QUESTIONS
        for each in record["answers"]:
            check(each["answer"], each["data"])


def test_an_answer_that_was_cut_is_an_error_of_its_document(source: Path, tmp_path: Path) -> None:
    result, found = run(tmp_path, source, *schema(tmp_path), new=6)
    assert result.code == 1
    for record in found.values():
        assert "use more --max-new-tokens" in record["error"]
        assert "summary" not in record
    result, found = run(tmp_path, source, *schema(tmp_path))
    assert result.code == 0, result.err
    assert all("data" in record for record in found.values())


def test_an_answer_that_was_cut_leaves_those_to_other_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = Instructions(("Who?", "Why?"), are_questions=True)
    format = PromptFormat(schema='{"enum": ["yes", "no"]}')
    job = BatchJob("model", None, "weights", questions, format, 12, 400, "float32", None, GREEDY)
    builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), format, 400, 12)
    destination = Destination(tmp_path / "out.jsonl")
    with ResultFiles(destination, ["a"]) as files, Display(1, sys.stderr) as display:
        document = Document("a", tmp_path / "a")
        report = Report([document], [document], files, display)
        progress = DocumentsInProgress(builder, job, files.records.parts, report.add)
        progress.begin("a", DocumentText("It was.", {}, Identity("1")))
        first, second = progress.work()
        progress.finish(first, answer('"yes"'))
        progress.finish(second, {**answer('"n'), "finish_reason": "length"})
        with pytest.raises(TierForceError, match="1 answer has an error in place of data"):
            report.conclude(400)
    with (
        ResultFiles(destination, ["a"]) as files,
        pytest.raises(TierForceError, match="1 answer has an error in place of data"),
    ):
        conclude_finished([document], files)
    (record,) = records(tmp_path / "out.jsonl")
    whole, cut = record["answers"]
    assert (whole["data"], cut["data"], cut["answer"]) == ("yes", None, '"n')
    assert "--max-new-tokens" in cut["error"]
    assert "error" not in whole
    assert "1 of 2 answers have an error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ('{"type": "text"}', "Invalid type: text"),
        ('{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ("[]", "object or boolean"),
        ("[" * 100_000, "is not JSON"),
        ("", "empty"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_before_models_load(
    content: str, reason: str, source: Path, tmp_path: Path
) -> None:
    missing = ("--model", str(tmp_path / "missing"))
    paths = ("--input", str(source), "--output", str(tmp_path / "out.jsonl"))
    result = forked(tmp_path, "summarize", *missing, *paths, *schema(tmp_path, content))
    assert reason in refused(result)
    assert not (tmp_path / "out.jsonl").exists()


def test_generate_prints_json(tmp_path: Path) -> None:
    own = (*MODELS, *GREEDY_FP32, *schema(tmp_path))
    result = forked(tmp_path, "generate", *own, "--prompt", "class", "--max-new-tokens", "400")
    assert result.code == 0, result.err
    jsonschema.validate(json.loads(result.out), SCHEMA)
    cut = forked(tmp_path, "generate", *own, "--prompt", "class", "--max-new-tokens", "5")
    assert cut.code == 1
    assert "use more --max-new-tokens" in cut.err
