"""Markdown of an answer, rendered on a terminal while it is written."""

from __future__ import annotations

import re

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from decoding.app.terminal.streams import without_controls

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class MarkdownWriter:
    """Prints an answer block by block; the last block is shown as it is, until it is complete."""

    def __init__(self, console: Console):
        self._console, self._block = console, ""
        self._live: Live | None = None
        self._has_printed = False

    def write(self, piece: str) -> None:
        """Add a piece of the answer."""
        self._block += without_controls(piece)
        while end := _end_of_block(self._block):
            self._print(self._block[:end])
            self._block = self._block[end:]
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        lines = Text(self._block).wrap(self._console, self._console.width)
        shown = lines[-max(1, self._console.height - 1) :]
        self._live.update(Text("\n").join(shown), refresh=True)

    def close(self) -> None:
        """Print what is left."""
        if self._live is not None:
            self._live.stop()
        self._print(self._block)
        self._block = ""

    def _print(self, block: str) -> None:
        if not block.strip():
            return
        if self._has_printed:
            self._console.print()
        # without hyperlinks: the address of a link is shown, not hidden in it
        self._console.print(Markdown(block, hyperlinks=False))
        self._has_printed = True


def _end_of_block(text: str) -> int:
    """Return where the first block that is complete ends, and another one begins; 0 if none does.

    A line that is indented continues a block, such as a list, after empty lines, too.
    """
    fence, position, has_begun, is_separated = "", 0, False, False
    for line in text.splitlines(keepends=True):
        if is_separated and not line[0].isspace():
            return position
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
        elif mark:
            fence = mark[1]
        is_empty = not line.strip()
        is_separated = has_begun and is_empty and not fence
        has_begun = has_begun or not is_empty
        position += len(line)
    return 0
