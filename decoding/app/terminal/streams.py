"""Lines for the person at the terminal: never an escape sequence that a document's name brought
along, never the end of a job.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO

from offload.errors import TierForceError

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class SafeStderr:
    """A text stream that may have lost its reader: what cannot be written is dropped, since
    progress must not end a job.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        # a closed pipe, a full disk, a terminal that is gone; a closed file
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CheckedStdout:
    """Standard output: what cannot be written ends a command, with a line that says so.

    A reader that has left (`| head`) ends it without a line, as SIGPIPE would. What comes behind
    that is dropped: nothing is tried again.
    """

    def __init__(self, stream: TextIO | None):
        """None: it was closed by whoever started this."""
        self._is_closed = stream is None
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # characters that its encoding lacks are spelt out
                stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click tries whether it can have bytes
            raise TypeError("standard output takes text")
        if not text:  # and whether it can have text
            return 0
        if self._is_closed:
            raise self._lost("it is closed")
        with self._writing():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._writing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            lost = self._lost(error.strerror)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise lost from error

    def _lost(self, why: str | None) -> TierForceError:
        self._is_closed, self._stream = False, open(os.devnull, "w")  # noqa: SIM115
        return TierForceError(f"standard output cannot be written: {why}.")


def printable(text: str) -> str:
    """Spell out control characters, so that no id or file name can steer the terminal: ESC becomes
    \\x1b.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def without_controls(text: str) -> str:
    """Spell out what may steer a terminal in a text that a model has written.

    Those are control characters but tabs and ends of lines, and what overrides the direction of
    writing. All else stays as it is, characters that join others, too.
    """
    text = text.replace("\r\n", "\n")
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def silence_transformers() -> None:
    """Keep transformers from warning and from showing progress of its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def say(line: str) -> None:
    """Print one line on standard error, as it is."""
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def warn(line: str) -> None:
    """Print one line on standard error that is not to be overlooked."""
    say(f"warning: {line}")


def advice_after_loss(arguments: Sequence[str]) -> str:
    """Return what to do when a command with these arguments has lost a rank or its memory."""
    command = next((each for each in arguments if not each.startswith("-")), "")
    if command == "summarize":
        return "Finished records are safe: run the same command again to go on."
    if command == "serve":
        return (
            "Requests that were not answered are lost; what --prompt-cache has on disk is safe. Start the "
            "server again."
        )
    return "Run the same command again."


def show_cursor() -> None:
    """Let the terminal show its cursor, which progress hides."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")
            sys.stderr.flush()
