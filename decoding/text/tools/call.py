"""What reads a call of a tool in an answer, whatever its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Functions = Mapping[str, Mapping[str, Any]]  # the JSON schemas of their arguments, by name


class CallReader:
    """Reads one call as it is generated: its name, and then pieces of its arguments' JSON."""

    name: str | None = None
    is_complete = False  # its arguments are
    is_over = False  # there is no more of it; without a name it is no call

    def __init__(self, functions: Functions, first_step: Callable[[], bool]):
        """Read a call of one of `functions`, by steps; one that needs more text returns False."""
        self.functions = functions
        self.text = ""  # an object in a list that is no call
        self.rest = ""  # text that is not read yet; all other text if this is no call
        self._step = first_step
        self._arguments = ""  # read since the last return

    def read(self, text: str) -> str:
        """Read more text; return the next piece of the arguments."""
        self.rest += text
        self._arguments = ""
        while not self.is_over and self._step():
            pass
        return self._arguments

    def _end(self) -> bool:
        self.is_over = True
        return False
