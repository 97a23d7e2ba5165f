"""Markdown of an answer, rendered on a terminal while it is written.

Nothing of the text is lost: what rich would drop or shorten, such as HTML, tables and escapes, is
shown as it was written.
"""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from decoding.app.terminal.streams import without_controls

_PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": 100})
# entities could stand for control characters
_PARSER.enable("strikethrough").disable(["entity", "reference"])
_ESCAPED = "*_`~#<\\"  # after a backslash; TeX has it before brackets


def _escape(state: StateInline, silent: bool) -> bool:
    """Parse a backslash and what it escapes."""
    pair = state.src[state.pos : state.pos + 2]
    if len(pair) < 2 or pair[0] != "\\" or pair[1] not in _ESCAPED:
        return False
    if not silent:
        state.pending += pair[1]
    state.pos += 2
    return True


_PARSER.inline.ruler.at("escape", _escape)


class MarkdownWriter:
    """Prints an answer block by block; the last block is shown as it is, until it is complete."""

    def __init__(self, console: Console):
        self._console, self._block = console, ""
        self._live: Live | None = None
        self._has_printed = False

    def write(self, piece: str) -> None:
        """Add a piece of the answer."""
        self._block += without_controls(piece)
        if "\n" in piece and (end := _end_of_blocks(self._block)):
            self._print(self._block[:end])
            self._block = self._block[end:]
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            self._console.show_cursor()  # a signal may end the process before it would be shown
        width, height = self._console.width, max(1, self._console.height - 1)
        lines = Text(self._block[-width * height :]).wrap(self._console, width)
        self._live.update(Text("\n").join(lines[-height:]), refresh=True)

    def close(self) -> None:
        """Print what is left."""
        if self._live is not None:
            self._live.stop()
        self._print(self._block)
        self._block = ""

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._has_printed:
            self._console.print()
        # without hyperlinks: the address of a link is shown, not hidden in it
        rendered = Markdown("", hyperlinks=False)
        rendered.parsed = list(map(_shown, _PARSER.parse(text)))
        self._console.print(rendered)
        self._has_printed = True


def _shown(token: Token) -> Token:
    """Return a token that keeps line breaks, and addresses of images."""
    for child in token.children or ():
        if child.type == "softbreak":
            child.type, child.tag = "hardbreak", "br"
        elif child.type == "image":
            source = child.attrs.get("src", "")
            child.content, child.type, child.tag = f"![{child.content}]({source})", "text", ""
            child.children = None
    return token


def _end_of_blocks(text: str) -> int:
    """Return where the last block of whole lines begins: those before it are complete."""
    lines = text.split("\n")
    tokens = _PARSER.parse("\n".join([*lines[:-1], ""]))
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map]
    return sum(len(line) + 1 for line in lines[: starts[-1]]) if starts else 0
