"""Lines for the person at the terminal: never an escape sequence that a document's name brought
along, never the end of a job.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO

from offload.errors import TierForceError


class Unread:
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


class Output:
    """Standard output: what cannot be written ends a command, with a line that says so.

    What comes behind that is dropped: nothing is tried again.
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
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._lost(error.strerror) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise self._lost(error.strerror) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

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


def show_cursor() -> None:
    """Let the terminal show its cursor, which progress hides."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")
            sys.stderr.flush()
