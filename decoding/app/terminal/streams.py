"""Output to the terminal: control characters are escaped, and a failed write to standard error
never ends a job.
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
    """A text stream whose write errors are ignored: lost progress must not end a job."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        # OSError: a closed pipe, a full disk, a lost terminal. ValueError: a closed file.
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CheckedStdout:
    """Standard output whose write errors end a command, with a line that says why.

    If the reader has left (`| head`), the command exits without a message, as if by SIGPIPE. After
    an error, further output is dropped.
    """

    def __init__(self, stream: TextIO | None):
        """`stream` is None if the parent process closed standard output."""
        self._is_closed = stream is None
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # characters outside its encoding are escaped
                stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click probes whether the stream is binary
            raise TypeError("standard output takes text")
        if not text:  # or text
            return 0
        if self._is_closed:
            raise self._close("it is closed")
        with self._report_write_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._report_write_errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            lost = self._close(error.strerror)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise lost from error

    def _close(self, reason: str | None) -> TierForceError:
        self._is_closed, self._stream = False, open(os.devnull, "w")  # noqa: SIM115
        return TierForceError(f"standard output cannot be written: {reason}.")


def printable(text: str) -> str:
    """Escape control characters, so that no id or file name can control the terminal: ESC becomes
    \\x1b.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def without_controls(text: str) -> str:
    """Escape characters of generated text that could control a terminal.

    They are control characters other than tabs and newlines, and overrides of the text direction.
    All others stay, including joiners.
    """
    text = text.replace("\r\n", "\n")
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def write(text: str) -> None:
    """Write to standard output, and flush. Raises TierForceError if that fails.

    For a terminal, control characters are escaped; files and pipes get the text unchanged.
    """
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 document, 1,200 documents."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def silence_transformers() -> None:
    """Turn off the warnings and progress bars of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def say(line: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def warn(line: str) -> None:
    """Print one line on standard error, marked as a warning."""
    say(f"warning: {line}")


def advice_after_loss(arguments: Sequence[str]) -> str:
    """Return what to do after a command with these arguments lost a rank or ran out of memory."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command == "summarize":
        return "Finished records are safe: run the same command again to resume."
    if command == "serve":
        return (
            "Unanswered requests are lost; prompts stored by --prompt-cache are safe. Start the "
            "server again."
        )
    return "Run the same command again."


def show_cursor() -> None:
    """Show the cursor, which progress bars hide."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")
            sys.stderr.flush()
