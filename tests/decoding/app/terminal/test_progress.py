"""Progress where there is no terminal: lines for people, now and then."""

from __future__ import annotations

import io
import time

import pytest

import decoding.app.terminal.progress as progress
from decoding.app.terminal.pace import Pace, Size
from decoding.app.terminal.progress import Display
from decoding.engine.stats import Stats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.05)
    return io.StringIO()


def wait_for(stream: io.StringIO, words: str) -> None:
    end = time.monotonic() + 30
    while words not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_lines_have_counts_and_the_time_that_is_left(stream: io.StringIO) -> None:
    now, name = [0.0], "a\x1b[2J"
    pace = Pace({"b": Size(4_000, "text", True)}, 10, clock=lambda: now[0])
    with Display(6, stream, 1, pace) as display:
        display.begin(name)
        wait_for(stream, "1 of 6 documents; a\\x1b[2J\n")
        pace.begin(name, 4_000)
        pace.request(name, name, 1_000, reads=True)
        now[0] = 2.0
        pace.prefill(name, name, 0.5)
        display.prefill(name, 1, 2)
        wait_for(stream, "1 of 6 documents; a\\x1b[2J: 50% read; reading 250 tokens/s\n")
        now[0] = 4.0
        pace.prefill(name, name, 1.0)
        display.prefill(name, 2, 2)
        now[0] = 5.0
        pace.decode(name, name, 5, 0)
        display.decode(name, 10, Stats(token_ids=[1, 2, 3, 4, 5]))
        # half an answer, and b: 4 s to read, and 2 s to write
        words = "5 tokens written; about 10 s left; reading 250, writing 5.0 tokens/s\n"
        wait_for(stream, words)
        display.end(name, "a: done")
        display.begin("b")
        wait_for(stream, "2 of 6: a: done\n")
        wait_for(stream, "2 of 6 documents; b; about ")
    length = len(stream.getvalue())
    time.sleep(0.2)
    assert len(stream.getvalue()) == length  # nothing after the end


def test_many_documents_at_a_time_are_counted(stream: io.StringIO) -> None:
    with Display(9, stream) as display:
        for name in "abcde":
            display.begin(name)
        display.update("b", 2, 7, "2 of 7 parts")
        wait_for(stream, "0 of 9 documents; a; b: 2 of 7 parts; c; and 2 more\n")


def test_batch_without_rows_has_lines_too(stream: io.StringIO) -> None:
    """As on a cluster, whose documents begin elsewhere."""
    pace = Pace({}, 10, is_live=False)
    with Display(2, stream, pace=pace) as display:
        for name in "ab":
            pace.begin(name, 4_000)
            pace.request(name, name, 1_000, reads=True)
        wait_for(stream, "0 of 2 documents\n")
        counts = {"reused_tokens": 0, "loaded_tokens": 0, "new_tokens": 5}
        pace.finish("a", "a", {**counts, "time_to_first_token_s": 200.0, "decode_s": 100.0})
        display.end("a", "a: done")
        wait_for(stream, "1 of 2 documents; about 5 min left\n")


def test_a_single_document_has_no_number(stream: io.StringIO) -> None:
    with Display(1, stream) as display:
        display.begin("a")
        wait_for(stream, "a\na\n")
        display.end("a", "a: done")
    assert stream.getvalue().endswith("\na: done\n")


@pytest.mark.parametrize(
    ("variable", "value", "is_terminal"),
    [("TERM", "dumb", True), ("TERM", "dumb", False), ("FORCE_COLOR", "1", False)],
)
def test_without_rows_there_are_lines(
    variable: str, value: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.05)
    monkeypatch.setenv(variable, value)
    stream = Terminal() if is_terminal else io.StringIO()
    with Display(2, stream) as display:
        display.begin("a")
        wait_for(stream, "0 of 2 documents; a\n")
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_rows_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    stream = Terminal()
    pace = Pace({"b": Size(400_000, "text", True)}, 10)
    monkeypatch.setattr(pace, "_describe", lambda: "about 14 min left; reading 332, writing 11.3")
    display = Display(6, stream, 1, pace)
    name = "a book with a rather long name.epub, part 3 of 19"
    display.begin(name)
    display.prefill(name, 1, 3)
    display.console.print(display._rows.progress.get_renderable())
    batch, part = (line for line in stream.getvalue().splitlines() if line.strip())
    assert "1 of 6 doc" in batch
    assert "about 14 min" in batch or columns < 60
    assert "of 19" in part
    assert "33% read" in part
    assert ("━" in part) == (columns >= 100)
