"""Markdown on a terminal, while it is written."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.markdown import Markdown

from decoding.app.terminal.markdown import MarkdownWriter, _end_of_block

ANSWER = """# The whale

It is **white**, and
[large](http://example.org/whale).

1. first

   of two paragraphs

2. second

```python
def sea():

    return "salt"
```

The end."""
BLOCKS = [
    "# The whale\n\n",
    "It is **white**, and\n[large](http://example.org/whale).\n\n",
    "1. first\n\n   of two paragraphs\n\n",
    "2. second\n\n",
    '```python\ndef sea():\n\n    return "salt"\n```\n\n',
]


def shown(terminal: bool, pieces: list[str]) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=40, height=10)
    writer = MarkdownWriter(console)
    for piece in pieces:
        writer.write(piece)
    writer.close()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_blocks_end_where_another_one_begins() -> None:
    text, blocks = ANSWER, []
    while end := _end_of_block(text):
        blocks.append(text[:end])
        text = text[end:]
    assert blocks == BLOCKS
    assert text == "The end."


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_rendered_whatever_its_pieces(size: int) -> None:
    pieces = [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]
    found = [line.rstrip() for line in shown(False, pieces).splitlines()]
    console = Console(file=StringIO(), width=40)
    console.print(Markdown(ANSWER, hyperlinks=False))
    assert isinstance(console.file, StringIO)
    expected = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line for line in found if line] == [line for line in expected if line]
    assert "(http://example.org/whale)" in " ".join(found)


def test_what_is_not_complete_is_shown_as_it_is() -> None:
    output = shown(True, ["It is **wh", "ite**."])
    assert "It is **wh" in output
    assert output.rstrip().endswith("\x1b[1mwhite\x1b[0m.")


def test_control_characters_are_escaped() -> None:
    output = shown(True, ["a\x1b]0;title\x07b"])
    assert "\x1b]0" not in output
    assert "\\x1b" in output
