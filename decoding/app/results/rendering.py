"""Records as text for people: Markdown, or plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from decoding.app.terminal.streams import printable, without_controls
from offload.errors import TierForceError

_MARKUP = re.compile(r"[\\`*\[\]<>&]|(?<!\w)_|_(?!\w)|#+$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_WIDTH = 78  # the longest line below a heading, in plain text


def render(record: Mapping[str, Any], format: str) -> str:
    """Return a record in `jsonl`, `md` or `txt`, with the end of its last line.

    Raises TierForceError if fields are missing, as in a record that was edited.
    """
    if format == "jsonl":
        return json.dumps(record, ensure_ascii=False) + "\n"
    try:
        style = _Markdown() if format == "md" else _PlainText()
        blocks = [style.heading(record["id"], 1), *_blocks(record, style)]
    except (AttributeError, KeyError, TypeError) as error:
        raise TierForceError(
            f"the record of {record['id']} is not complete ({type(error).__name__}: {error})."
        ) from error
    return "\n\n".join(filter(None, blocks)) + "\n"


def notes(record: Mapping[str, Any]) -> list[str]:
    """Return what the reader of a finished record should know about it."""
    lines = list[str]()
    if dropped := record.get("truncated_tokens"):
        lines.append(f"its last {dropped:,} tokens were not read")
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
    return [f"cut at {record['max_new_tokens']:,} tokens"] if is_cut else []


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
        return without_controls(text)

    def data(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=2)


class _Markdown(_PlainText):
    """The same in Markdown."""

    def heading(self, title: str, level: int) -> str:
        return f"{'#' * level} {_escape(title)}"

    def note(self, text: str) -> str:
        return f"*{_escape(text)}*"

    def error(self, text: str) -> str:
        return f"**Failed:** {_escape(text)}"

    def text(self, text: str) -> str:
        """Return generated Markdown, with an end for its last block of code: the next record is
        no part of it.
        """
        fence = ""
        for line in text.splitlines():
            if (match := _FENCE.match(line)) is not None:
                own, rest = match.groups()
                if not fence:
                    fence = "" if own[0] in rest else own  # else code within a line
                elif own.startswith(fence) and not rest.strip():
                    fence = ""
        return without_controls(f"{text}\n{fence}" if fence else text)

    def data(self, value: Any) -> str:
        return f"```json\n{super().data(value)}\n```"


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
    yield style.data(record["data"]) if record.get("data") is not None else style.text(text)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _escape(text: str) -> str:
    return _MARKUP.sub(lambda match: "".join(f"\\{char}" for char in match[0]), _one_line(text))
