"""`chat` and `ask`: what a person types, and what is answered."""

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

SOON_S = 0.3  # in place of the second in which two interrupts are one


def type_from(path: Path) -> None:
    sys.stdin = path.open()


def type_hastily(path: Path) -> None:
    from decoding.app.interactive import chat

    chat.DOUBLE_INTERRUPT_S = SOON_S
    type_from(path)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def type_at_home(path: Path) -> None:
    os.environ["HOME"] = str(path.parent)
    type_from(path)


def typed(folder: Path, lines: list[str], *command: str) -> Finished:
    """Run a command with these lines for its standard input."""
    path = folder / "typed.txt"
    path.write_text("\n".join(lines))
    return forked(folder, *command, before=partial(type_at_home, path))


def test_a_conversation(model: tuple[str, ...], story: tuple[str, str], tmp_path: Path) -> None:
    saved, other = tmp_path / "saved.json", tmp_path / "other.txt"
    other.write_text("no conversation\n")
    lines = ["Who?", "/stats", "Why?", "/save ~/saved.json", f"/save {other}", "/nonsense", "/help"]
    found = typed(
        tmp_path, [*lines, "/clear", "Who?", "/quit", "never asked"], "chat", *model, *story
    )
    assert found.code == 0, found.err
    who, why, again = found.out.splitlines()
    assert who == again
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": who},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": why},
    ]
    assert other.read_text() == "no conversation\n"
    assert "other.txt is no conversation" in found.err
    assert "/nonsense is no command" in found.err
    assert "/load FILE" in found.err
    assert "tokens were there before" in found.err
    assert "story.txt:" in found.err  # what reading took
    # with one that was saved, the next answer is that of the same conversation
    lines = [f"/load {saved}", "/load nowhere.json", "//Who?"]
    more = typed(tmp_path, lines, "chat", *model, *story)
    assert more.code == 0
    assert "2 questions and answers" in more.err
    assert "nowhere.json cannot be read: No such file" in more.err
    assert len(more.out.splitlines()) == 1
    # one question alone is answered alike
    single = forked(tmp_path, "ask", *model, *story, "Who?")
    assert (single.code, single.out) == (0, f"{who}\n")
    # and by two ranks
    two = typed(tmp_path, ["Who?", "Why?"], "chat", *model, *story, "--gpus", "2")
    assert (two.code, two.out.splitlines()) == (0, [who, why])


@pytest.mark.parametrize("ranks", [(), ("--gpus", "2")])
def test_an_interrupt_ends_an_answer_and_not_the_program(
    ranks: tuple[str, ...], model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ("--link", "emulated:0.05", "--gpu-kv-layers", "0", "--mode", "plain")
    command = ("chat", *model, *story, *slow, *ranks, "--max-new-tokens", "900")
    job = Fork(tmp_path, *command, before=partial(type_from, fifo))
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
            said = "tokens were there before"
            job.wait_for(lambda said=said, n=answers: err.read_text().count(said) == n)
        job.send_signal(signal.SIGINT)
        job.wait_for(lambda: "/quit or Ctrl-D leaves" in err.read_text())
    found = job.finish()
    assert found.code == 0, found.err
    assert max(map(len, found.out.splitlines())) < 3000


@pytest.mark.slow
def test_a_second_interrupt_ends_all(
    model: tuple[str, ...], story: tuple[str, str], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ("--link", "emulated:0.01", "--gpu-kv-layers", "0", "--mode", "plain")
    job = Fork(tmp_path, "chat", *model, *story, *slow, before=partial(type_hastily, fifo))
    out = job.folder / "out"
    with fifo.open("w") as keyboard:
        keyboard.write("Who?\n")
        keyboard.flush()
        job.wait_for(lambda: size(out))
        for _ in range(2):  # sooner, it could be the same one sent twice
            job.send_signal(signal.SIGINT)
            time.sleep(SOON_S + 0.1)
        found = job.finish(10)
    assert found.code == 130
    assert "interrupted (SIGINT)" in found.err


def test_lines_that_are_no_text_are_refused_alone(model: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "typed.txt"
    path.write_bytes(b"Who?\n\xff\xfe\nWhy?\n\xe4")
    found = forked(tmp_path, "chat", *model, before=partial(type_from, path))
    assert found.code == 0
    assert found.err.count("that line is not UTF-8") == 2
    assert len(found.out) > 20


def test_what_cannot_be_talked_about_is_refused(model: tuple[str, ...], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" ")
    for document, reason in (("nowhere.txt", "cannot be read"), (str(empty), "empty")):
        result = forked(tmp_path, "ask", *model, "--document", document, "Who?")
        assert reason in refused(result)
    silent = forked(tmp_path, "chat", "--model", str(TARGET), "--device", "cpu")
    assert "has no chat template" in refused(silent)
