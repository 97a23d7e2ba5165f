"""Records as text for people: Markdown, or plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from decoding.app.options import FORMATS
from decoding.app.terminal.streams import counted, printable, without_controls
from offload.errors import TierForceError

_MARKUP = re.compile(r"[\\`*\[\]<>&]|(?<!\w)_|_(?!\w)|#+$")
_OPENINGS = re.compile(r"```|~~~|<[!?A-Za-z]")  # all blocks that may be left open begin so
_NEXT = "# next record"
_WIDTH = 78  # the longest line below a heading, in plain text


def check_format(format: str) -> None:
    """Raise TierForceError for a format that is not known."""
    if format not in FORMATS:
        raise TierForceError(f"--format {format} is not known: use {', '.join(FORMATS)}.")


def render(record: Mapping[str, Any], format: str) -> str:
    """Return a record in `jsonl`, `md` or `txt`, with the end of its last line.

    Of a record that was edited, and is not as a job writes it, the text says so.
    """
    if format == "jsonl":
        return json.dumps(record, ensure_ascii=False) + "\n"
    style = _Markdown() if format == "md" else _PlainText()
    try:
        blocks = list(_blocks(record, style))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        blocks = [style.error(f"the record is not as tierforce writes it ({reason})")]
    return "\n\n".join([style.heading(record["id"], 1), *blocks]) + "\n"


def notes(record: Mapping[str, Any]) -> list[str]:
    """Return what the reader of a finished record should know about it."""
    lines = list[str]()
    if dropped := record.get("truncated_tokens"):
        were = "was" if dropped == 1 else "were"
        lines.append(f"its last {counted(dropped, 'token')} {were} not read")
    if lacking := record.get("source", {}).get("note"):
        lines.append(lacking)
    return lines + length_notes(record)


def length_notes(record: Mapping[str, Any]) -> list[str]:
    """Return those of the notes that are not known before a document is summarised."""
    first = next(iter(record.get("answers", ())), record)
    count = len(first.get("parts", ()))
    return [*([f"read in {count} parts"] if count else []), *_cut(record, record)]


def _cut(answer: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """Return a note if an answer ends at the maximum length of the record."""
    is_cut = answer.get("finish_reason") == "length" and "error" not in answer
    return [f"cut at {counted(record['max_new_tokens'], 'token')}"] if is_cut else []


class _PlainText:
    """The elements of plain text."""

    def heading(self, title: str, level: int) -> str:
        """Return a heading: underlined, or a question."""
        title = _one_line(title)
        return f"{title}\n{'=' * min(len(title), _WIDTH)}" if level == 1 else f"Q: {title}"

    def note(self, text: str) -> str:
        return f"[{_one_line(text)}]"

    def error(self, text: str) -> str:
        return f"Failed: {_one_line(text)}"

    def text(self, text: str) -> str:
        """Return generated text."""
        return without_controls(text)

    def data(self, value: Any) -> str:
        return without_controls(json.dumps(value, ensure_ascii=False, indent=2))


class _Markdown(_PlainText):
    """The same in Markdown."""

    def heading(self, title: str, level: int) -> str:
        return f"{'#' * level} {_escape(title)}"

    def note(self, text: str) -> str:
        return f"*{_escape(text)}*"

    def error(self, text: str) -> str:
        return f"**Failed:** {_escape(text)}"

    def text(self, text: str) -> str:
        """Return generated Markdown; as a block of code, if what follows would be a part of it."""
        text = without_controls(text)
        return text if _ends(text) else _fenced(text)

    def data(self, value: Any) -> str:
        return _fenced(super().data(value), "json")


def _blocks(record: Mapping[str, Any], style: _PlainText) -> Iterator[str]:
    """Yield the paragraphs below a record's heading."""
    if "error" in record:
        yield style.error(record["error"])
        return
    for answer in record.get("answers", ()):
        yield style.heading(answer["question"], 2)
        yield from _answer(answer, answer["answer"], style)
        yield from map(style.note, _cut(answer, record))
    if "summary" in record:
        yield from _answer(record, record["summary"], style)
    if own := notes(record):
        yield style.note("; ".join(own))


def _answer(record: Mapping[str, Any], text: str, style: _PlainText) -> Iterator[str]:
    if "error" in record:  # JSON was cut
        yield style.error(record["error"])
    if record.get("data") is not None:
        yield style.data(record["data"])
    else:
        yield style.text(text) if text.strip() else style.note("no answer")


def _ends(text: str) -> bool:
    """Return whether all blocks of a Markdown text end with it."""
    if not _OPENINGS.search(text):
        return True
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").parse(f"{text}\n\n{_NEXT}")
    return any(token.type == "heading_open" and token.level == 0 for token in tokens[-3:-2])


def _fenced(text: str, language: str = "") -> str:
    """Return a text as a block of code."""
    runs = [len(list(run)) for char, run in groupby(text) if char == "`"]
    fence = "`" * max(3, *(run + 1 for run in runs), 0)
    return f"{fence}{language}\n{text}\n{fence}"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _escape(text: str) -> str:
    return _MARKUP.sub(lambda match: "".join(f"\\{char}" for char in match[0]), _one_line(text))
