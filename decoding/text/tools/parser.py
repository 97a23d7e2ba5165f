"""Calls of tools in the text of an answer, found as it is generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.text.tools.forms import ToolForm

_MAX_NAME = 400  # characters before the arguments of a call that is no JSON object


@dataclass
class ToolCallDelta:
    """A part of a call: the first has its name, and each a piece of its arguments' JSON."""

    index: int  # the call's
    name: str | None
    arguments: str


@dataclass
class AnswerDelta:
    """A part of an answer."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)  # one for each call

    def add(self, index: int, name: str | None, arguments: str) -> None:
        """Add to a call."""
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        elif name is not None or arguments:
            self.calls.append(ToolCallDelta(index, name, arguments))

    def __add__(self, other: AnswerDelta) -> AnswerDelta:
        """Return this part and the next one as one."""
        joined = AnswerDelta(self.content + other.content, list(map(replace, self.calls)))
        for call in other.calls:
            joined.add(call.index, call.name, call.arguments)
        return joined


class ToolCallParser:
    """Separates an answer into text and calls, as it is generated.

    What looks like a call but is none stays text. Arguments are the model's own JSON; if the answer
    was cut they are incomplete.
    """

    def __init__(self, form: ToolForm, max_calls: int | None = None):
        """Find calls in a form; those after the first `max_calls` are dropped."""
        self.form, self.max_calls = form, max_calls
        self.count = 0  # complete calls
        self._buffer = ""  # text that is not returned yet
        self._scanner = _ObjectScanner()
        self._scanned = 0  # characters of the buffer that the scanner has seen
        self._read: Callable[[AnswerDelta], bool]  # the next step; False if it needs more text
        self._read = self._read_text if form.begin else self._read_start

    @property
    def has_calls(self) -> bool:
        """Return whether there are calls, or the beginning of one."""
        return self.count > 0 or self._read == self._read_arguments

    def feed(self, text: str) -> AnswerDelta:
        """Return what can be returned of an answer after its next text."""
        self._buffer += text
        part = AnswerDelta()
        while self._read(part):
            pass
        return part

    def rest(self) -> AnswerDelta:
        """Return what is left at the end of the answer."""
        part = self.feed("")
        while self._read == self._read_head:  # the beginning of a call, which is none
            self._reject(part)
            part += self.feed("")
        is_shown = self._read in (self._read_text, self._read_start)
        if is_shown and (not self.count or self._buffer.strip()):
            part.content += self._buffer
        self._buffer = ""
        return part

    def _read_text(self, part: AnswerDelta) -> bool:
        """Return text up to a call, without the blanks before it."""
        begin, buffer = self.form.begin, self._buffer
        if not begin:  # an answer that is text, or has had its calls
            part.content, self._buffer = part.content + buffer, ""
            return False
        content, marker, rest = buffer.partition(begin)
        if not marker:
            content = buffer[: len(buffer) - _overlap(buffer, begin)]
            rest = buffer[len(content.rstrip()) :]
        part.content += content.rstrip()
        self._buffer = rest
        if marker:
            self._begin_call()
        return bool(marker)

    def _read_start(self, part: AnswerDelta) -> bool:
        """Tell whether an answer is a call, in a form whose calls begin with their object."""
        own, prefix = self._buffer.lstrip(), self.form.prefix
        own = own.removeprefix(prefix).lstrip()
        if not own or prefix.startswith(own):
            return False
        if own[0] == "{":
            self._buffer = own
            self._begin_call()
        else:
            self._read = self._read_text
        return True

    def _begin_call(self) -> None:
        self._scanner, self._scanned = _ObjectScanner(), 0
        self._read = self._read_head

    def _read_head(self, part: AnswerDelta) -> bool:
        """Read a call up to its arguments, or all of an object with others, or in another order."""
        form = self.form
        if form.is_list and not self._scanned:
            self._buffer = self._buffer.lstrip(form.separators)
        if (match := form.head.match(self._buffer)) is not None:
            self._add(part, match[1], "")
            self._buffer = self._buffer[match.end() :]
            self._scanner = _ObjectScanner()
            self._scanner.find_end(match[0] if form.key else "", 0)
            self._read = self._read_arguments
            return True
        own = self._buffer.lstrip()
        has_name = "{" not in own and len(own) <= _MAX_NAME
        if not (own[:1] in ("", "{") if form.key else has_name):
            self._reject(part)
            return True
        if not form.key or not own:
            return False
        end = self._scanner.find_end(self._buffer[self._scanned :], 0)
        if end is None:
            self._scanned = len(self._buffer)
            return False
        return self._take_object(part, self._scanned + end)

    def _take_object(self, part: AnswerDelta, end: int) -> bool:
        """Take a whole object at the start of the buffer as a call, or as text if it is none."""
        call = _call_of(self._buffer[:end], self.form.key)
        if call is None:
            self._reject(part)
        else:
            self._add(part, *call)
            self._buffer = self._buffer[end:]
            self.count += 1
            self._read = self._read_between
        return True

    def _read_arguments(self, part: AnswerDelta) -> bool:
        end = self._scanner.find_end(self._buffer, 1 if self.form.key else 0)
        self._add(part, None, self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self.count += 1
            self._read = self._read_tail if self.form.key else self._read_between
        return end is not None

    def _read_tail(self, part: AnswerDelta) -> bool:
        """Drop the end of a call's object; some models leave it out."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        has_members = self._buffer[0] == ","
        self._read = self._read_members if has_members else self._read_between
        if not has_members:
            self._buffer = self._buffer.removeprefix("}")
        return True

    def _read_members(self, part: AnswerDelta) -> bool:
        """Drop the members of a call's object that follow its arguments."""
        end = self._scanner.find_end(self._buffer, 0)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._read = self._read_between
        return end is not None

    def _read_between(self, part: AnswerDelta) -> bool:
        """Drop what separates calls."""
        form = self.form
        own = self._buffer.lstrip(form.separators)
        self._buffer = own
        if not own or (form.end.startswith(own) and own != form.end):
            return False
        self._buffer = own.removeprefix(form.end)
        has_next = own[0] == "{" and (form.is_list or not form.begin)
        if has_next:
            self._begin_call()
        else:
            self._read = self._read_text
        return True

    def _reject(self, part: AnswerDelta) -> None:
        """Take the marker before the buffer as text, since no call follows it."""
        part.content += self.form.begin
        self._read = self._read_text

    def _add(self, part: AnswerDelta, name: str | None, arguments: str) -> None:
        if self.max_calls is None or self.count < self.max_calls:
            part.add(self.count, name, arguments)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that a marker begins with."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((each for each in lengths if marker.startswith(text[-each:])), 0)


class _ObjectScanner:
    """Finds where objects and lists end in JSON that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0  # open brackets
        self._in_string = self._is_escaped = False

    def find_end(self, text: str, depth: int) -> int | None:
        """Read on; return the index after the bracket that leaves `depth` open, if there is one."""
        for index, each in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = each == "\\", each != '"'
            elif each == '"':
                self._in_string = True
            elif each in "{[":
                self._depth += 1
            elif each in "}]":
                self._depth -= 1
                if self._depth <= depth:
                    return index + 1
        return None


def _call_of(text: str, key: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is a JSON object; None if it is none."""
    try:
        call: dict[str, Any] = json.loads(text, strict=False)
        name, arguments = call.get("name"), call.get(key)
        if isinstance(arguments, str):  # JSON in a string
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return None
        return name, json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
