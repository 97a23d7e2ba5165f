"""Records as text for people: complete, in their order, and without an effect on what follows."""

from __future__ import annotations

from typing import Any

import pytest
from markdown_it import MarkdownIt

from decoding.app.results.rendering import render


def record(**more: Any) -> dict[str, Any]:
    return {"id": "emma.txt", "summary": "Emma is rich.", "max_new_tokens": 512, **more}


ANSWERS = [
    {"question": "Who?", "answer": "Emma.", "finish_reason": "stop"},
    {"question": "Why *so*?\nReally?", "answer": "Since", "finish_reason": "length"},
]
JSON = {"summary": '{"rich": true}', "data": {"rich": True, "name": "Émma"}}
CUT = {
    "question": "Rich?",
    "answer": '{"ri',
    "data": None,
    "error": "cut",
    "finish_reason": "length",
}


@pytest.mark.parametrize(
    ("content", "markdown", "text"),
    [
        (record(), "# emma.txt\n\nEmma is rich.\n", "emma.txt\n========\n\nEmma is rich.\n"),
        (
            record(finish_reason="length"),
            "# emma.txt\n\nEmma is rich.\n\n*cut at 512 tokens*\n",
            "emma.txt\n========\n\nEmma is rich.\n\n[cut at 512 tokens]\n",
        ),
        (
            record(parts=[{}, {}], source={"format": "pdf", "note": "page 3 has no text"}),
            "# emma.txt\n\nEmma is rich.\n\n*page 3 has no text; read in 2 parts*\n",
            "emma.txt\n========\n\nEmma is rich.\n\n[page 3 has no text; read in 2 parts]\n",
        ),
        (
            record(truncated_tokens=1200),
            "# emma.txt\n\nEmma is rich.\n\n*its last 1,200 tokens were not read*\n",
            "emma.txt\n========\n\nEmma is rich.\n\n[its last 1,200 tokens were not read]\n",
        ),
        (
            {"id": "emma.txt", "error": "the document is empty.", "kind": "InvalidRequestError"},
            "# emma.txt\n\n**Failed:** the document is empty.\n",
            "emma.txt\n========\n\nFailed: the document is empty.\n",
        ),
        (
            {"id": "emma.txt", "answers": ANSWERS, "max_new_tokens": 512},
            "# emma.txt\n\n## Who?\n\nEmma.\n\n## Why \\*so\\*? Really?\n\nSince\n\n"
            "*cut at 512 tokens*\n",
            "emma.txt\n========\n\nQ: Who?\n\nEmma.\n\nQ: Why *so*? Really?\n\nSince\n\n"
            "[cut at 512 tokens]\n",
        ),
        (
            record(**JSON),
            '# emma.txt\n\n```json\n{\n  "rich": true,\n  "name": "Émma"\n}\n```\n',
            'emma.txt\n========\n\n{\n  "rich": true,\n  "name": "Émma"\n}\n',
        ),
        (
            {"id": "emma.txt", "answers": [CUT], "max_new_tokens": 2},
            '# emma.txt\n\n## Rich?\n\n**Failed:** cut\n\n{"ri\n',
            'emma.txt\n========\n\nQ: Rich?\n\nFailed: cut\n\n{"ri\n',
        ),
        (
            record(summary=" \n"),
            "# emma.txt\n\n*no answer*\n",
            "emma.txt\n========\n\n[no answer]\n",
        ),
    ],
)
def test_markdown_and_text(content: dict[str, Any], markdown: str, text: str) -> None:
    assert render(content, "md") == markdown
    assert render(content, "txt") == text


@pytest.mark.parametrize(
    ("id", "heading"),
    [
        ("my_first_book.txt", "# my_first_book.txt"),
        ("_a_ `b` [c](d) <e> & f\\g #", r"# \_a\_ \`b\` \[c\](d) \<e\> \& f\\g \#"),
        ("two\nlines\x1b[2J", r"# two lines\\x1b\[2J"),
    ],
)
def test_ids_are_no_markup(id: str, heading: str) -> None:
    assert render(record(id=id), "md").startswith(f"{heading}\n\n")


@pytest.mark.parametrize(
    "summary",
    [
        "```python\nx = 1\n```",
        "~~~ a~b\nx\n~~~",
        "```x``` is code, and 1 < 2",
        "    ```\nx",
        "- step:\n  ```py\n  x = 1\n  ```",
        "- a\n  - b\n\n    ```py\n    x",
        "<b>bold</b>, and <!-- a comment -->",
    ],
)
def test_markdown_is_left_as_it_is(summary: str) -> None:
    assert render(record(summary=summary), "md") == f"# emma.txt\n\n{summary}\n"


@pytest.mark.parametrize(
    "summary",
    [
        "```python\nx = 1",
        "~~~~\nx\n~~~",
        "```\n```json\nx",
        "- step:\n  ```py\n  x = 1\n```",
        "a\u2028```\nb\n\n```\nc",
        "<!-- open",
        "<script>\nx",
        "a\n<pre>\nb",
        "<?php",
        "````\n```",
    ],
)
def test_markdown_that_would_take_in_the_next_record_is_code(summary: str) -> None:
    both = render(record(summary=summary), "md") + "\n" + render(record(id="next"), "md")
    tokens = MarkdownIt("commonmark").parse(both)
    headings = [index for index, token in enumerate(tokens) if token.type == "heading_open"]
    assert [tokens[index + 1].content for index in headings] == ["emma.txt", "next"]
    (code,) = (token for token in tokens if token.type == "fence")
    assert code.content == f"{summary}\n"


def test_control_characters_are_escaped() -> None:
    assert "\\x1b[2J" in render(record(summary="\x1b[2J"), "txt")
    assert "\\u202e" in render(record(data="\u202e"), "md")


def test_jsonl_is_the_record() -> None:
    assert render({"id": "ü", "summary": ""}, "jsonl") == '{"id": "ü", "summary": ""}\n'


NESTED: Any = []
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "content",
    [
        {"answers": [{"question": "Who?"}]},
        {"answers": 3},
        {"summary": "A", "truncated_tokens": "9"},
        {"summary": "A", "finish_reason": "length"},
        {"summary": "A", "data": NESTED},
        {"summary": None},
    ],
    ids=range(6),
)
def test_an_edited_record_is_shown_as_such(content: dict[str, Any]) -> None:
    for format in ("md", "txt"):
        assert "the record is not as tierforce writes it" in render({"id": "a", **content}, format)
