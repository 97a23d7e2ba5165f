"""`chat` and `ask`: typed lines, and their answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from support.commands import TARGET, Finished, Fork, forked, refused
from support.slow import slow_except

SHORT_INTERRUPT_S = 0.3  # seconds in which two interrupts count as one, instead of 1


def read_stdin_from(path: Path) -> None:
    sys.stdin = path.open()


def read_stdin_with_short_interrupt(path: Path) -> None:
    from decoding.app.interactive import chat

    chat.DOUBLE_INTERRUPT_S = SHORT_INTERRUPT_S
    read_stdin_from(path)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_stdin_at_home(path: Path) -> None:
    os.environ["HOME"] = str(path.parent)
    read_stdin_from(path)


def run_with_input(folder: Path, lines: list[str], *command: str) -> Finished:
    """Run a command with these lines on its standard input."""
    path = folder / "typed.txt"
    path.write_text("\n".join(lines))
    return forked(folder, *command, before=partial(read_stdin_at_home, path))


def test_chat_commands(model: tuple[str, ...], story: tuple[str, str], tmp_path: Path) -> None:
    saved, other = tmp_path / "saved.json", tmp_path / "other.txt"
    other.write_text("no conversation\n")
    lines = ["Who?", "/stats", "Why?", "/save ~/saved.json", f"/save {other}", "/nonsense", "/help"]
    result = run_with_input(
        tmp_path, [*lines, "/clear", "Who?", "/quit", "never asked"], "chat", *model, *story
    )
    assert result.code == 0, result.err
    who, why, again = result.out.splitlines()
    assert who == again
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": who},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": why},
    ]
    assert other.read_text() == "no conversation\n"
    assert "other.txt is not a conversation" in result.err
    assert "/nonsense is not a command" in result.err
    assert "/load FILE" in result.err
    assert "in the cache" in result.err
    assert "story.txt:" in result.err  # the time of prefill
    # A loaded conversation continues.
    lines = [f"/load {saved}", "/load nowhere.json", "//Who?"]
    resumed = run_with_input(tmp_path, lines, "chat", *model, *story)
    assert resumed.code == 0
    assert "2 questions and answers" in resumed.err
    assert "nowhere.json cannot be read: No such file" in resumed.err
    assert len(resumed.out.splitlines()) == 1
    # A single question gets the same answer.
    answer = forked(tmp_path, "ask", *model, *story, "Who?")
    assert (answer.code, answer.out) == (0, f"{who}\n")
    # Two ranks give the same answers.
    two_ranks = run_with_input(tmp_path, ["Who?", "Why?"], "chat", *model, *story, "--gpus", "2")
    assert (two_ranks.code, two_ranks.out.splitlines()) == (0, [who, why])


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_another_document(
    ranks: tuple[str, ...], model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    """/document starts over; an unreadable one changes nothing."""
    other = tmp_path / "other.txt"
    other.write_text("There was a lighthouse at the end of the bay. " * 40)
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    lines = ["Who?", f"/document {other}", "Who?", f"/document {tmp_path}/broken.pdf"]
    lines += ["/document", "/document a\0b", "Why?", "/raw", f"/document {story[1]}", "Who?"]
    result = run_with_input(tmp_path, lines, "chat", *model, *story, *ranks)
    assert result.code == 0, result.err
    first, second, third, raw, fourth = result.out.splitlines()
    assert (fourth, raw) == (first, third)
    assert "other.txt: " in result.err
    assert "as its download interrupted?" in result.err
    assert "/document needs a file name" in result.err
    assert "a file name has no NUL characters" in result.err
    about = run_with_input(tmp_path, ["Who?", "Why?"], "chat", *model, "--document", str(other))
    assert about.out.splitlines() == [second, third]


def test_a_document_that_is_too_long_is_mentioned(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    lines = [f"/document {story[1]}", "/raw"]
    result = run_with_input(tmp_path, lines, "chat", *model, "--context", "500")
    assert "the document is too long for the context of 500 tokens: its last" in result.err
    assert "there is no answer yet" in result.err


def test_a_message_of_several_lines(model: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    quoted = ['"""', "    if x:", "", "        y()  ", '"""', '"""/save it"""', '"""hi""" means?']
    last = '"""the last'
    result = run_with_input(tmp_path, [*quoted, f"/save {saved}", last], "chat", *model)
    assert result.code == 0, result.err
    questions = [each["content"] for each in json.loads(saved.read_text())["messages"][::2]]
    assert questions == ["    if x:\n\n        y()", "/save it", '"""hi""" means?']
    assert "saved 6 messages" in result.err


@pytest.mark.parametrize("ranks", slow_except([pytest.param(()), pytest.param(("--gpus", "2"))]))
def test_interrupt_ends_the_answer_only(
    ranks: tuple[str, ...], model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ("--link", "emulated:0.05", "--gpu-kv-layers", "0", "--mode", "plain")
    command = ("chat", *model, *story, *slow, *ranks, "--max-new-tokens", "900")
    job = Fork(tmp_path, *command, before=partial(read_stdin_from, fifo))
    out, err = job.folder / "out", job.folder / "err"
    with fifo.open("w") as keyboard:
        for answers in (1, 2):
            before = size(out)
            keyboard.write("Who?\n")
            keyboard.flush()
            job.wait_for(lambda before=before: size(out) > before + 5)
            job.send_signal(signal.SIGINT)
            keyboard.write("/stats\n")
            keyboard.flush()
            stats = "in the cache"
            job.wait_for(lambda stats=stats, n=answers: err.read_text().count(stats) == n)
        job.send_signal(signal.SIGINT)
        job.wait_for(lambda: "/quit or Ctrl-D quits" in err.read_text())
    result = job.finish()
    assert result.code == 0, result.err
    assert max(map(len, result.out.splitlines())) < 3000


@pytest.mark.slow
def test_second_interrupt_exits(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ("--link", "emulated:0.01", "--gpu-kv-layers", "0", "--mode", "plain")
    job = Fork(
        tmp_path,
        "chat",
        *model,
        *story,
        *slow,
        before=partial(read_stdin_with_short_interrupt, fifo),
    )
    out = job.folder / "out"
    with fifo.open("w") as keyboard:
        keyboard.write("Who?\n")
        keyboard.flush()
        job.wait_for(lambda: size(out))
        for _ in range(2):  # closer together they would count as one
            job.send_signal(signal.SIGINT)
            time.sleep(SHORT_INTERRUPT_S + 0.1)
        result = job.finish(10)
    assert result.code == 130
    assert "interrupted (SIGINT)" in result.err


def test_line_that_is_not_utf8_is_skipped(model: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "typed.txt"
    path.write_bytes(b"Who?\n\xff\xfe\nWhy?\n\xe4")
    result = forked(tmp_path, "chat", *model, before=partial(read_stdin_from, path))
    assert result.code == 0
    assert result.err.count("that line is not UTF-8") == 2
    assert len(result.out) > 20


def test_unusable_document_or_model_is_an_error(model: tuple[str, ...], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" ")
    for document, reason in (("nowhere.txt", "cannot be read"), (str(empty), "empty")):
        result = forked(tmp_path, "ask", *model, "--document", document, "Who?")
        assert reason in refused(result)
    no_template = forked(tmp_path, "chat", "--model", str(TARGET), "--device", "cpu")
    assert "has no chat template" in refused(no_template)
