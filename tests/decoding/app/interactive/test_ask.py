"""`ask` about a document longer than the context asks its parts, and merges the answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.commands import TARGET, Finished, forked, refused
from support.prompts import passages
from support.slow import slow_except

SHORT = ("--context", "500")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("in") / "long.txt"
    path.write_text(passages(None, AutoTokenizer.from_pretrained(TARGET), [1000])[0])
    return path


def ask(folder: Path, model: tuple[str, ...], document: Path, *more: str) -> Finished:
    return forked(folder, "ask", *model, *SHORT, "--document", str(document), *more)


def test_parts_are_asked_and_answers_merged(
    model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    result = ask(tmp_path, model, document, "Who?")
    assert result.code == 0, result.err
    assert result.out.strip()
    (count,) = set(re.findall(r"long.txt, part \d+ of (\d+): ", result.err))
    assert result.err.count(f"of {count}: ") == int(count) > 1
    assert "dropped" not in result.err
    two_ranks = ask(tmp_path, model, document, "Who?", "--gpus", "2")
    assert (two_ranks.code, two_ranks.out) == (0, result.out)


def test_document_is_cut_if_asked_for(
    model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    result = ask(tmp_path, model, document, "Who?", "--long", "cut")
    assert result.code == 0
    assert "tokens were dropped (without --long cut it is read in parts)" in result.err
    assert "part 1" not in result.err
    other = ask(tmp_path, model, document, "Who?", "--long", "drop")
    assert "--long drop is not known: use split, cut" in refused(other)


def test_second_question_loads_the_parts_from_the_prompt_cache(
    model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    cache = ("--prompt-cache", str(tmp_path / "cache"))
    document.write_text(document.read_text())
    for question, is_loaded in (("Who?", False), ("Why is that so, and since when?", True)):
        result = ask(tmp_path, model, document, question, *cache)
        assert result.code == 0, result.err
        assert ("tokens loaded from disk" in result.err) == is_loaded


def test_question_that_is_too_long_is_an_error(
    model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    result = ask(tmp_path, model, document, "Who? " * 40)
    assert "the question has" in refused(result)


@pytest.mark.parametrize(
    "context",
    slow_except([pytest.param(()), pytest.param(("--context", "2000"))], 1),
    ids=["parts", "whole"],
)
def test_questions_of_a_file_are_answered_after_one_prefill(
    context: tuple[str, ...], model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    questions = ["Who?", "What became of the man who is named first?", "Why?"]
    path = tmp_path / "questions.txt"
    path.write_text("\n\n".join(questions))
    result = ask(tmp_path, model, document, "--questions", str(path), *context)
    assert result.code == 0, result.err
    alone = [ask(tmp_path, model, document, question, *context).out for question in questions]
    pairs = zip(questions, alone, strict=True)
    assert result.out == "\n".join(f"## {question}\n\n{answer}" for question, answer in pairs)
    counts = r"(?:(\d+) tokens in the cache, )?(\d+)(?: tokens)? read in"
    lines = re.sub(r"(?<=\d),(?=\d)", "", result.err)
    found = [(int(read), int(cached or 0)) for cached, read in re.findall(counts, lines)]
    parts = 1 if context else len(re.findall("part .*question 1 of 3:", result.err))
    assert sum(read > 200 for read, _ in found) == parts
    assert sum(read + cached > 200 for read, cached in found) == len(questions) * parts
    assert len(found) == len(questions) * (parts + (0 if context else 1))


@pytest.mark.parametrize(
    "context",
    slow_except([pytest.param(()), pytest.param(("--context", "2000"))], 1),
    ids=["parts", "whole"],
)
def test_question_that_cannot_be_asked_leaves_the_others(
    context: tuple[str, ...], model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("Who?\n" + "Who is it? " * 900 + "\nWhy?\n")
    result = ask(tmp_path, model, document, "--questions", str(path), *context)
    assert result.code == 1
    assert "question 2 of 3: the " in result.err
    assert "1 of 3 questions could not be answered" in result.err
    headings = [line for line in result.out.splitlines() if line.startswith("## ")]
    assert headings == ["## Who?", "## Why?"]


def test_system_message_changes_the_answers(
    model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    system = ("--system", "Answer in verse, and at length, as a poet of another age would do.")
    for context in ((), ("--context", "2000")):
        plain, other = (
            ask(tmp_path, model, document, "Who?", *context, *more) for more in ((), system)
        )
        assert (plain.code, other.code) == (0, 0)
        assert plain.out != other.out


def test_a_question_is_given_once(model: tuple[str, ...], document: Path, tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("Who?")
    for more in ((), ("Who?", "--questions", str(path))):
        result = ask(tmp_path, model, document, *more)
        assert "give either a question, in quotes, or --questions" in refused(result)


@pytest.mark.slow
def test_answers_are_json_under_a_schema(
    model: tuple[str, ...], document: Path, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no", 3]}')
    for more in ((), ("--long", "cut")):
        result = ask(tmp_path, model, document, "Who?", "--schema", str(schema), *more)
        assert result.code == 0, result.err
        assert json.loads(result.out) in ("yes", "no", 3)
    # the document leaves room for the schema, too
    values = {"enum": ["yes", *(f"a long answer, number {number}" for number in range(12))]}
    schema.write_text(json.dumps(values))
    whole = ("--schema", str(schema), "--long", "cut", "--max-new-tokens", "40")
    result = ask(tmp_path, model, document, "Who?", *whole)
    assert result.code == 0, result.err
    assert json.loads(result.out) in values["enum"]
    short = ("--schema", str(schema), "--max-new-tokens", "1")
    for more in ((), ("--context", "4000")):
        cut = ask(tmp_path, model, document, "Who?", *short, *more)
        assert cut.code == 1
        assert "use more --max-new-tokens" in cut.err
