"""The prompt cache: a document is prefilled once, whichever command uses it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.chat_model import STORY
from support.commands import Fork, forked, refused
from support.slow import slow_except


def list_prompts(folder: Path) -> list[dict[str, object]]:
    return json.loads(forked(folder, "prompt-cache", "list", str(folder / "kept"), "--json").out)


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_document_is_prefilled_once(
    ranks: tuple[str, ...], model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "kept"
    options = (*ranks, "--prompt-cache", str(cache))
    expected = forked(tmp_path, "ask", *model, *story, "Who?").out
    prefilled = forked(tmp_path, "prefill", *model, *story, *options)
    assert prefilled.code == 0, prefilled.err
    assert "story.txt is stored in" in prefilled.err
    (prompt,) = list_prompts(tmp_path)
    assert (prompt["name"], prompt["model"]) == ("story.txt", "model")
    answer = forked(tmp_path, "ask", *model, *story, *options, "Who?")
    assert (answer.code, answer.out) == (0, expected)
    assert "loaded from disk" in answer.err
    again = forked(tmp_path, "prefill", *model, *story, *options)
    assert again.code == 0
    assert "loaded from disk" in again.err
    # A damaged file gives a warning, and is prefilled and stored again.
    (layer,) = cache.glob("*/rank-0-layer-0.kv")
    os.truncate(layer, 100)
    answer = forked(tmp_path, "ask", *model, *story, *options, "Who?")
    assert (answer.code, answer.out) == (0, expected)
    assert "warning: the cached prompt of story.txt is corrupt" in answer.err
    assert len(list_prompts(tmp_path)) == 1


def test_batch_stores_documents_for_questions(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    cache, books = tmp_path / "kept", tmp_path / "books"
    books.mkdir()
    for name in ("a", "b", "c"):
        (books / f"{name}.txt").write_text(name + STORY)
    job = ("summarize", *model, "--input", str(books))
    forked(tmp_path, *job, "--output", str(tmp_path / "without.jsonl"))
    for run in range(2):
        output = tmp_path / f"{run}.jsonl"
        result = forked(tmp_path, *job, "--output", str(output), "--prompt-cache", str(cache))
        assert result.code == 0, result.err
        records = {record["id"]: record for record in map(json.loads, output.open())}
        for record in map(json.loads, (tmp_path / "without.jsonl").open()):
            assert records[record["id"]]["summary"] == record["summary"]
        assert all(bool(record["loaded_tokens"]) == bool(run) for record in records.values())
    assert {prompt["name"] for prompt in list_prompts(tmp_path)} == {"a.txt", "b.txt", "c.txt"}
    answer = ("ask", *model, "--document", str(books / "b.txt"), "Who?")
    assert "loaded from disk" in forked(tmp_path, *answer, "--prompt-cache", str(cache)).err


def test_prompts_are_listed_and_dropped(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "kept"
    forked(tmp_path, "prefill", *model, *story, "--prompt-cache", str(cache))
    (prompt,) = list_prompts(tmp_path)
    table = forked(tmp_path, "prompt-cache", "list", str(cache))
    assert table.code == 0
    assert str(prompt["id"]) in table.out
    assert "story.txt" in table.out
    assert "1 prompt," in table.err
    for wrong, reason in (
        (("list", str(tmp_path / "nowhere")), "is not a folder"),
        (("list", ""), "'' is not a folder"),
        (("drop", "", "--all"), "'' is not a folder"),
        (("drop", str(cache)), "name the prompts to drop"),
        (("drop", str(cache), "--all", str(prompt["id"])), "name the prompts to drop"),
        (("drop", str(cache), "0123"), "has no prompt with the id 0123"),
    ):
        assert reason in refused(forked(tmp_path, "prompt-cache", *wrong))
    assert forked(tmp_path, "prompt-cache", "drop", str(cache), str(prompt["id"])).code == 0
    assert not list_prompts(tmp_path)
    assert forked(tmp_path, "prompt-cache", "drop", str(cache), "--all").code == 0


def test_prompt_that_cannot_be_stored_is_an_error(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Nothing much.")
    options = ("--prompt-cache", str(tmp_path / "kept"))
    for command, reason in (
        (("prefill", *model, *story), "name one with --prompt-cache"),
        (("prefill", *model, *story, "--prompt-cache", str(short)), "cannot be used: it is a file"),
        (
            ("prefill", *model, *story, "--prompt-cache-limit", "1"),
            "--prompt-cache-limit limits the folder",
        ),
        (
            ("summarize", *model, *options, "--input", "x", "--output", "y", "--cluster", "local"),
            "--c",
        ),
    ):
        result = forked(tmp_path, *command)
        assert reason in refused(result)
    for command, reason in (
        (
            ("prefill", *model, *story, *options, "--prompt-cache-limit", "0.0001"),
            "more than --prompt-cache-limit 0.0001",
        ),
        (("prefill", *model, "--document", str(short), *options), "again is as fast"),
    ):
        result = forked(tmp_path, *command)
        assert result.code == 1
        assert reason in result.err
        assert ".txt was prefilled, but not stored" in result.err.splitlines()[-1]
    assert not list_prompts(tmp_path)


def test_partial_files_of_killed_job_are_collected(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "kept"
    slow = ("--link", "emulated:0.01", "--gpu-kv-layers", "4")
    job = Fork(tmp_path, "prefill", *model, *story, "--prompt-cache", str(cache), *slow)
    job.wait_for(lambda: list(cache.glob(".writing-*/*.kv")))
    job.process.kill()
    job.finish()
    assert list(cache.glob(".writing-*"))
    assert not list_prompts(tmp_path)
    assert forked(tmp_path, "prompt-cache", "drop", str(cache), "--all").code == 0
    assert not list(cache.glob(".writing-*"))
