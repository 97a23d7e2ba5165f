"""Standard output errors are reported once, and text for the terminal is escaped."""

from __future__ import annotations

import io
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from decoding.app.interactive import generate
from decoding.app.terminal.files import check_writable
from decoding.app.terminal.streams import CheckedStdout, advice_after_loss
from offload.errors import TierForceError
from support.commands import TARGET, Fork, wait_for


def test_closed_standard_output_raises_once() -> None:
    output = CheckedStdout(None)
    output.flush()
    with pytest.raises(TierForceError, match="standard output cannot be written: it is closed"):
        output.write("text")
    output.write("more")
    output.flush()


def test_full_standard_output_raises_once() -> None:
    output = CheckedStdout(open("/dev/full", "w"))  # noqa: SIM115
    output.write("text")
    with pytest.raises(TierForceError, match="cannot be written: No space left on device"):
        output.flush()
    output.write("more")
    output.flush()


def test_characters_outside_the_encoding_are_escaped() -> None:
    raw = io.BytesIO()
    output = CheckedStdout(io.TextIOWrapper(raw, encoding="ascii"))
    output.write("né 😀")
    output.flush()
    assert raw.getvalue() == b"n\\xe9 \\U0001f600"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\ttwo\nthree\r\n", "one\ttwo\nthree\n"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m\x7f\x00\b\r", "\\x9b31m\\x7f\\x00\\x08\\r"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("né 😀 \U0001f469\u200d\U0001f52c \u05d0\u200f", None),
    ],
)
def test_generated_text_cannot_control_a_terminal(
    text: str, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and pipes get it unchanged."""
    for is_terminal in (True, False):
        stream = io.StringIO(newline="")
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdout", CheckedStdout(stream))
        generate.write(text)
        assert stream.getvalue() == (shown if is_terminal and shown else text)


def _wait_for_file(path: Path) -> None:
    wait_for(path.exists)


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("summarize", "--help"),
        ("--version",),
        ("prompt-cache", "list", str(Path(__file__).parent), "--json"),
        ("plan", "--model", str(TARGET)),
        ("plan", "--model", str(TARGET), "--json"),
        ("generate", "--model", str(TARGET), "--device", "cpu", "--prompt", "It was"),
    ],
    ids=" ".join,
)
def test_broken_pipe_ends_command_quietly(command: tuple[str, ...], tmp_path: Path) -> None:
    pipe, closed = tmp_path / "pipe", tmp_path / "closed"
    os.mkfifo(pipe)
    job = Fork(tmp_path, *command, out=pipe, before=partial(_wait_for_file, closed))
    pipe.open("rb").close()
    closed.touch()
    finished = job.finish()
    assert finished.code == 128 + signal.SIGPIPE
    assert "tierforce:" not in finished.err
    assert "pipe" not in finished.err


def test_file_name_with_nul_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierForceError, match="is not a valid file name"):
        check_writable("/save", tmp_path / "a\0b")


@pytest.mark.parametrize(
    ("arguments", "present", "absent"),
    [
        (["summarize", "--input", "books"], "Finished records are safe", "server"),
        (["serve", "--gpus", "2"], "Start the server again", "records"),
        (["generate", "--prompt", "summarize"], "Run the same command again", "records"),
        ([], "Run the same command again", "records"),
    ],
)
def test_advice_depends_on_the_command(arguments: list[str], present: str, absent: str) -> None:
    advice = advice_after_loss(arguments)
    assert present in advice
    assert absent not in advice
