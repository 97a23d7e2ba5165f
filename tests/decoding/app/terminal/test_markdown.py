"""Markdown on a terminal, while it is written."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from decoding.app.terminal.markdown import MarkdownWriter, _end_of_blocks

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
    "1. first\n\n   of two paragraphs\n\n2. second\n\n",
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
    """Only whole lines count: the next piece may make something else of the last one."""
    cuts = [_end_of_blocks(ANSWER[:length]) for length in range(len(ANSWER))]
    # "The end." is not a whole line
    assert sorted({ANSWER[:cut] for cut in cuts}, key=len) == [
        "".join(BLOCKS[:count]) for count in range(len(BLOCKS))
    ]
    assert _end_of_blocks("1. one\n\n2") == 0
    for unclosed in (
        "```\na\n``` not\n\n# b\n",
        "- ```py\n  x = 1\n\n  # b\n\n",
        "```x\n\n# b\n\n",
    ):
        assert _end_of_blocks(unclosed) == 0


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_rendered_whatever_its_pieces(size: int) -> None:
    pieces = [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]
    assert [line.rstrip() for line in shown(False, pieces).splitlines() if line.strip()] == [
        "               The whale",
        "It is white, and",
        "large (http://example.org/whale).",
        " 1 first",
        "   of two paragraphs",
        " 2 second",
        " def sea():",
        '     return "salt"',
        "The end.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nOkay.\n\nSecond thought.\n</think>\n\n4",
        "The type is List<int> and <path>.",
        "<config>\n  <a>1</a>\n</config>",
        "<!-- a comment -->",
        "| a | b |\n|---|---|\n| /a/very/long/path/without/any/blank | 2 |",
        "See [a][1].\n\n[1]: http://example.org/y",
        "![x](http://example.org/secret)",
        "Name: A\nStreet: B",
        r"\(a\) and \[b\]",
        "safe &#x202e;txt.exe &lt;",
        "a\u2028\u2028b",
    ],
)
def test_no_text_is_lost(text: str) -> None:
    output = shown(False, [text])
    assert "".join(output.split()) == "".join(text.split())
    assert len(output.splitlines()) >= len(text.splitlines())


def test_what_is_not_complete_is_shown_as_it_is() -> None:
    output = shown(True, ["It is **wh", "ite**."])
    assert "It is **wh" in output
    assert output.rstrip().endswith("\x1b[1mwhite\x1b[0m.")
    # a signal may end the process in the middle
    assert output.index("\x1b[?25l") < output.index("\x1b[?25h") < output.index("It is")


def test_control_characters_are_escaped() -> None:
    output = shown(True, ["a\x1b]0;title\x07b &#x202e; \u202e"])
    assert "\x1b]0" not in output
    assert "\u202e" not in output
    assert "\\x1b" in output
