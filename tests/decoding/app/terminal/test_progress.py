"""Progress where there is no terminal: lines for people, now and then."""

from __future__ import annotations

import io
import time

import pytest

import decoding.app.terminal.progress as progress
from decoding.app.terminal.pace import Pace, Size
from decoding.app.terminal.progress import Display, waiting
from decoding.engine.stats import Stats


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
    now = [0.0]
    pace = Pace({"b": Size(4_000, "text", True)}, 10, clock=lambda: now[0])
    with Display(6, stream, 1, pace) as display:
        display.begin("a\x1b[2J")
        wait_for(stream, "1 of 6 documents; a\\x1b[2J\n")
        pace.begin("a\x1b[2J", 4_000)
        pace.request("a\x1b[2J", "a\x1b[2J", 1_000, reads=True)
        now[0] = 2.0
        display.prefill("a\x1b[2J", 1, 2)
        wait_for(stream, "1 of 6 documents; a\\x1b[2J: 50% read; 250 tokens/s read\n")
        now[0] = 4.0
        display.prefill("a\x1b[2J", 2, 2)
        now[0] = 5.0
        display.decode("a\x1b[2J", 10, Stats(token_ids=[1, 2, 3, 4, 5]))
        # half an answer, and b: 4 s to read, and 2 s to write
        words = "5 tokens written; about 10 s left, 250 tokens/s read, 5.0 written\n"
        wait_for(stream, words)
        display.end("a\x1b[2J", "a: done")
        display.begin("b")
        wait_for(stream, "2 of 6: a: done\n")
        wait_for(stream, "2 of 6 documents; b; about ")
    lines = len(stream.getvalue())
    time.sleep(0.2)
    assert len(stream.getvalue()) == lines  # none after the end


def test_many_documents_at_a_time_are_counted(stream: io.StringIO) -> None:
    with Display(9, stream) as display:
        for name in "abcde":
            display.begin(name)
        display.answers("b", 2, 7, 7)
        wait_for(stream, "0 of 9 documents; a; b: 2 of 7 answers; c and 2 more\n")


def test_a_single_document_has_no_number(stream: io.StringIO) -> None:
    with waiting("loading a model", stream):
        wait_for(stream, "loading a model\nloading a model\n")
    with Display(1, stream) as display:
        display.begin("a")
        display.end("a", "a: done")
    assert stream.getvalue().endswith("\na: done\n")
