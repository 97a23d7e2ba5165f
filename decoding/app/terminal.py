"""Lines for the person at the terminal: never an escape sequence that a document's name brought
along, never the end of a job.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, TextIO


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
