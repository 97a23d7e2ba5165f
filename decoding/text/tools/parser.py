"""Calls of tools in the text of an answer, found as it is generated."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.text.tools.forms import BEGIN_OF_THOUGHTS, END_OF_THOUGHTS, ToolForm

_KEYS = ("arguments", "parameters")
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

    What looks like a call but is none stays text, as do a model's thoughts, whatever is in them.
    Arguments are the model's own JSON; if the answer was cut they are incomplete.
    """

    def __init__(
        self,
        form: ToolForm,
        names: Collection[str],
        max_calls: int | None = None,
        is_in_thoughts: bool = False,
        is_only_at_start: bool = False,
    ):
        """Find calls in a form.

        Args:
            form: how the model writes calls.
            names: functions that may be called.
            max_calls: calls after these are dropped.
            is_in_thoughts: whether the prompt ends in a thought, which the answer continues.
            is_only_at_start: whether no text may precede calls.
        """
        self.form, self.names, self.max_calls = form, names, max_calls
        self.count = 0  # complete calls
        self._thoughts = _Thoughts(is_in_thoughts)
        self._is_only_at_start = is_only_at_start or not form.begin
        self._buffer = ""  # text that is not returned yet
        self._begun = ""  # text before the buffer that begins a call
        self._scanner = _ObjectScanner()
        self._read: Callable[[AnswerDelta], bool]  # the next step; False if it needs more text
        self._read = self._read_start if self._is_only_at_start else self._read_text

    @property
    def has_calls(self) -> bool:
        """Return whether there are calls, the last of which is complete."""
        return self.count > 0 and self._read != self._read_arguments

    def feed(self, text: str) -> AnswerDelta:
        """Return what can be returned of an answer after its next text."""
        part = AnswerDelta()
        part.content, text = self._thoughts.feed(text)
        self._buffer += text
        while self._read(part):
            pass
        return part

    def rest(self) -> AnswerDelta:
        """Return what is left at the end of the answer."""
        part = self.feed("")
        part.content += self._thoughts.rest()
        if self._read == self._read_head:  # the beginning of a call, which is none
            self._reject(part)
        is_shown = self._read in (self._read_text, self._read_start)
        if is_shown and (not self.count or self._buffer.strip()):
            part.content += self._buffer
        self._buffer = ""
        return part

    def _read_text(self, part: AnswerDelta) -> bool:
        """Return text up to a call, without the blanks before it."""
        begin, buffer = self.form.begin, self._buffer
        if self._is_only_at_start and not self.count:
            begin = ""
        if not begin:
            part.content, self._buffer = part.content + buffer, ""
            return False
        content, marker, rest = buffer.partition(begin)
        if not marker:
            content = buffer[: len(buffer) - _overlap(buffer, begin)]
            rest = buffer[len(content.rstrip()) :]
        part.content += content.rstrip()
        self._buffer = rest
        if marker:
            self._begin_call(marker)
        return bool(marker)

    def _read_start(self, part: AnswerDelta) -> bool:
        """Tell whether an answer begins with a call."""
        own, begin = self._buffer.lstrip(), self.form.begin or self.form.prefix
        if begin.startswith(own):
            return False
        has_marker, own = own.startswith(begin), own.removeprefix(begin).lstrip()
        if not (own or self.form.begin):
            return False
        if has_marker if self.form.begin else own[0] == "{":
            begun = self._buffer[: len(self._buffer) - len(own)]
            self._buffer = own
            self._begin_call(begun)
        else:
            self._read = self._read_text
        return True

    def _begin_call(self, begun: str) -> None:
        self._begun, self._scanner = begun, _ObjectScanner()
        self._read = self._read_head

    def _read_head(self, part: AnswerDelta) -> bool:
        """Read a call up to its arguments, or all of an object with others, or in another order."""
        form = self.form
        start = _list_start(self._buffer) if form.is_list and not self.count else 0
        if (match := form.head.match(self._buffer, start)) is not None:
            if match[1] not in self.names:
                self._reject(part)
                return True
            self._add(part, match[1], "")
            self._buffer = self._buffer[match.end() :]
            self._scanner = _ObjectScanner()
            self._scanner.find_end(match[0] if form.key else "", 0)
            self._read = self._read_arguments
            return True
        own = self._buffer[start:].lstrip()
        has_name = "{" not in own and len(own) <= _MAX_NAME
        if not (own[:1] in ("", "{") if form.key else has_name):
            self._reject(part)
            return True
        if not form.key or not own:
            return False
        seen = max(self._scanner.seen, start)
        end = self._scanner.find_end(self._buffer[seen:], 0)
        if end is None:
            self._scanner.seen = len(self._buffer)
            return False
        return self._take_object(part, start, seen + end)

    def _take_object(self, part: AnswerDelta, start: int, end: int) -> bool:
        """Take a whole object in the buffer as a call, or as text if it is none."""
        call = _call_of(self._buffer[start:end], is_marked=bool(self.form.begin))
        if call is None or call[0] not in self.names:
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
        """Drop what separates calls, or ends them."""
        form = self.form
        own = self._buffer.lstrip(form.blanks)
        if not own or (form.end.startswith(own) and own != form.end):
            return False
        if form.separator and own.startswith(form.separator):
            following = own.removeprefix(form.separator).lstrip()
            if not following:
                return False
            if following[0] == "{":
                self._buffer = following
                self._begin_call(form.separator)
                return True
        self._buffer = own.removeprefix("]" if form.is_list else form.end)
        self._read = self._read_text
        return True

    def _reject(self, part: AnswerDelta) -> None:
        """Take what is before the buffer as text, since no call follows it."""
        part.content += self._begun
        self._read = self._read_text

    def _add(self, part: AnswerDelta, name: str | None, arguments: str) -> None:
        if self.max_calls is None or self.count < self.max_calls:
            part.add(self.count, name, arguments)


class _Thoughts:
    """Finds where the thoughts end that an answer may begin with."""

    def __init__(self, has_begun: bool):
        self._begin = (
            "" if has_begun else BEGIN_OF_THOUGHTS
        )  # to be found first; empty: in thoughts
        self._end = END_OF_THOUGHTS  # to be found then; empty: after thoughts, or there are none
        self._held = ""  # text that may be a part of either

    def feed(self, text: str) -> tuple[str, str]:
        """Return thoughts, and what follows them."""
        if not self._end:
            return "", text
        text, self._held = self._held + text, ""
        if self._begin:
            if self._begin.startswith(text.lstrip()):
                self._held = text
                return "", ""
            if not text.lstrip().startswith(self._begin):
                self._end = ""
                return "", text
            self._begin = ""
        thoughts, end, rest = text.partition(self._end)
        if end:
            self._end = ""
            return thoughts + end, rest
        size = len(text) - _overlap(text, self._end)
        self._held = text[size:]
        return text[:size], ""

    def rest(self) -> str:
        """Return what is held at the end of an answer."""
        return self._held


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that a marker begins with."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((each for each in lengths if marker.startswith(text[-each:])), 0)


class _ObjectScanner:
    """Finds where objects and lists end in JSON that arrives in pieces."""

    def __init__(self) -> None:
        self.seen = 0  # characters of the text so far, for the caller
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


def _list_start(text: str) -> int:
    """Return the index after the bracket that begins a list of calls; 0 without one."""
    blanks = len(text) - len(text.lstrip())
    return blanks + 1 if text[blanks : blanks + 1] == "[" else 0


def _call_of(text: str, is_marked: bool) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is a JSON object; None if it is none.

    `is_marked`: a marker precedes it, so that it may have no arguments.
    """
    try:
        call: dict[str, Any] = json.loads(text, strict=False)
        name, keys = call.get("name"), [key for key in _KEYS if key in call]
        arguments = call[keys[0]] if keys else None
        if isinstance(arguments, str):  # JSON in a string
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return None
        if not (keys or is_marked):
            return None
        own = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        own.encode()  # raises ValueError for half a character
        return name, own
    except (ValueError, RecursionError):
        return None
