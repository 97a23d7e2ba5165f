"""`--prompt-cache`, `read` and `prompt_cache`: a document is read once, whichever command asks about it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.chat_model import STORY
from support.commands import Fork, forked, refused
from support.slow import slow_except


def listed(folder: Path) -> list[dict[str, object]]:
    return json.loads(forked(folder, "prompt-cache", "list", str(folder / "kept"), "--json").out)


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_a_document_is_read_once(
    ranks: tuple[str, ...], model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    keep = (*ranks, "--prompt-cache", str(kept))
    wanted = forked(tmp_path, "ask", *model, *story, "Who?").out
    read = forked(tmp_path, "prefill", *model, *story, *keep)
    assert read.code == 0, read.err
    assert "story.txt is kept in" in read.err
    (about,) = listed(tmp_path)
    assert (about["name"], about["model"]) == ("story.txt", "model")
    asked = forked(tmp_path, "ask", *model, *story, *keep, "Who?")
    assert (asked.code, asked.out) == (0, wanted)
    assert "of them from disk" in asked.err
    again = forked(tmp_path, "prefill", *model, *story, *keep)
    assert again.code == 0
    assert "of them from disk" in again.err
    # what is damaged is told, read anew, and kept again
    (layer,) = kept.glob("*/rank-0-layer-0.kv")
    os.truncate(layer, 100)
    asked = forked(tmp_path, "ask", *model, *story, *keep, "Who?")
    assert (asked.code, asked.out) == (0, wanted)
    assert "warning: what was kept of story.txt is damaged" in asked.err
    assert len(listed(tmp_path)) == 1


def test_a_batch_keeps_its_documents_for_questions(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    kept, books = tmp_path / "kept", tmp_path / "books"
    books.mkdir()
    for name in ("a", "b", "c"):
        (books / f"{name}.txt").write_text(name + STORY)
    job = ("summarize", *model, "--input", str(books))
    forked(tmp_path, *job, "--output", str(tmp_path / "without.jsonl"))
    for turn in range(2):
        output = tmp_path / f"{turn}.jsonl"
        done = forked(tmp_path, *job, "--output", str(output), "--prompt-cache", str(kept))
        assert done.code == 0, done.err
        records = {each["id"]: each for each in map(json.loads, output.open())}
        for each in map(json.loads, (tmp_path / "without.jsonl").open()):
            assert records[each["id"]]["summary"] == each["summary"]
        assert all(bool(each["loaded_tokens"]) == bool(turn) for each in records.values())
    assert {each["name"] for each in listed(tmp_path)} == {"a.txt", "b.txt", "c.txt"}
    asked = ("ask", *model, "--document", str(books / "b.txt"), "Who?")
    assert "of them from disk" in forked(tmp_path, *asked, "--prompt-cache", str(kept)).err


def test_what_is_kept_is_listed_and_dropped(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    forked(tmp_path, "prefill", *model, *story, "--prompt-cache", str(kept))
    (about,) = listed(tmp_path)
    table = forked(tmp_path, "prompt-cache", "list", str(kept))
    assert table.code == 0
    assert str(about["id"]) in table.out
    assert "story.txt" in table.out
    assert "1 text," in table.err
    for wrong, reason in (
        (("list", str(tmp_path / "nowhere")), "is no folder"),
        (("list", ""), "'' is no folder"),
        (("drop", "", "--all"), "'' is no folder"),
        (("drop", str(kept)), "say which texts are to go"),
        (("drop", str(kept), "--all", str(about["id"])), "say which texts are to go"),
        (("drop", str(kept), "0123"), "has no prompt with the id 0123"),
    ):
        assert reason in refused(forked(tmp_path, "prompt-cache", *wrong))
    assert forked(tmp_path, "prompt-cache", "drop", str(kept), str(about["id"])).code == 0
    assert not listed(tmp_path)
    assert forked(tmp_path, "prompt-cache", "drop", str(kept), "--all").code == 0


def test_what_cannot_be_kept_is_refused(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Nothing much.")
    keep = ("--prompt-cache", str(tmp_path / "kept"))
    for command, reason in (
        (("prefill", *model, *story), "name one with --prompt-cache"),
        (("prefill", *model, *story, "--prompt-cache", str(short)), "cannot be used: it is a file"),
        (
            ("prefill", *model, *story, "--prompt-cache-limit", "1"),
            "--prompt-cache-limit limits the folder",
        ),
        (
            ("summarize", *model, *keep, "--input", "x", "--output", "y", "--cluster", "local"),
            "--c",
        ),
    ):
        result = forked(tmp_path, *command)
        assert reason in refused(result)
    for command, reason in (
        (
            ("prefill", *model, *story, *keep, "--prompt-cache-limit", "0.0001"),
            "more than --prompt-cache-limit 0.0001",
        ),
        (("prefill", *model, "--document", str(short), *keep), "are read again as soon"),
    ):
        result = forked(tmp_path, *command)
        assert result.code == 1
        assert reason in result.err
        assert ".txt was read, and is not kept" in result.err.splitlines()[-1]
    assert not listed(tmp_path)


def test_a_job_that_is_killed_leaves_nothing_behind(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    slow = ("--link", "emulated:0.01", "--gpu-kv-layers", "4")
    job = Fork(tmp_path, "prefill", *model, *story, "--prompt-cache", str(kept), *slow)
    job.wait_for(lambda: list(kept.glob(".writing-*/*.kv")))
    job.process.kill()
    job.finish()
    assert list(kept.glob(".writing-*"))
    assert not listed(tmp_path)
    assert forked(tmp_path, "prompt-cache", "drop", str(kept), "--all").code == 0
    assert not list(kept.glob(".writing-*"))
