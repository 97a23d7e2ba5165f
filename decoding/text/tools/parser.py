"""Calls of tools in the text of an answer, found as it is generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from decoding.text.tools.call import CallReader, Functions
from decoding.text.tools.forms import ToolForm
from decoding.text.tools.json_call import JsonCall
from decoding.text.tools.tagged_call import TaggedCall, overlap

BLANK_LINE = "\n\n"  # between parts of an answer's text


@dataclass
class ToolCallDelta:
    """A part of a call: the first has its name, and each a piece of its arguments' JSON."""

    index: int  # the call's
    name: str | None
    arguments: str
    is_complete: bool = False  # this is the last part


@dataclass
class AnswerDelta:
    """A part of an answer: text and calls, in the order of the answer."""

    # adjacent pieces of one call, or of text, are one part
    parts: list[str | ToolCallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Return the text around all calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCallDelta]:
        """Return the calls."""
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def add_text(self, text: str) -> None:
        """Add text, if there is any."""
        if text and self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += text
        elif text:
            self.parts.append(text)

    def add_call(self, index: int, name: str | None, arguments: str, is_complete: bool) -> None:
        """Add to a call."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, ToolCallDelta) and last.index == index:
            last.arguments += arguments
            last.is_complete |= is_complete
        elif name is not None or arguments:
            self.parts.append(ToolCallDelta(index, name, arguments, is_complete))

    def __add__(self, other: AnswerDelta) -> AnswerDelta:
        """Return this part and the next one as one."""
        joined = AnswerDelta()
        for part in (*self.parts, *other.parts):
            if isinstance(part, str):
                joined.add_text(part)
            else:
                joined.add_call(part.index, part.name, part.arguments, part.is_complete)
        return joined


class AnswerParser(ABC):
    """Separates an answer into text and calls, as it is generated."""

    has_calls = False  # whether there is a complete call
    count = 0  # calls before the one that is being read
    max_calls: int | None = None  # calls after these are dropped
    call: CallReader | None = None  # reads a call; None between calls
    _has_text = False  # whether a text has begun
    _gap = ""  # precedes the next text

    @abstractmethod
    def feed(self, text: str) -> AnswerDelta:
        """Return what can be returned of an answer after its next text."""

    @abstractmethod
    def rest(self) -> AnswerDelta:
        """Return what is left at the end of the answer."""

    def _add_text(self, part: AnswerDelta, text: str) -> None:
        """Add to a text, if there is anything."""
        if text:
            part.add_text(self._gap + text)
            self._has_text, self._gap = True, ""

    def _end_text(self) -> None:
        """Separate what is added from now on from the text so far."""
        self._gap = BLANK_LINE if self._has_text else ""

    def _add_call(self, part: AnswerDelta, name: str | None, arguments: str) -> None:
        """Add to the call that is being read, unless it is dropped."""
        if self.call is not None and (self.max_calls is None or self.count < self.max_calls):
            part.add_call(self.count, name, arguments, self.call.is_complete)
            self.has_calls |= self.call.is_complete


class ToolCallParser(AnswerParser):
    """Separates text and calls by what begins a call in the model's form.

    What looks like a call but is none stays text, as do a model's thoughts, whatever is in them.
    Arguments are the model's own JSON, or made from tags; if the answer was cut, they are, too.
    """

    def __init__(
        self,
        form: ToolForm,
        functions: Functions,
        max_calls: int | None = None,
        is_in_thoughts: bool = False,
        is_only_at_start: bool = False,
    ):
        """Find calls in a form.

        Args:
            form: how the model writes calls.
            functions: functions that may be called, with the JSON schemas of their arguments.
            max_calls: calls after these are dropped.
            is_in_thoughts: whether the prompt ends in a thought, which the answer continues.
            is_only_at_start: whether no text may precede calls.
        """
        self.form, self.functions, self.max_calls = form, functions, max_calls
        self._thoughts = _Thoughts(form, is_in_thoughts)
        self._is_only_at_start = is_only_at_start or not form.begin
        self._buffer = ""  # text that is not returned yet
        # text that is none if a call follows: what begins it, or an object of a list that may have
        # more of them
        self._begun = ""
        # the next step; False if it needs more text
        self._read: Callable[[AnswerDelta], bool]
        self._read = self._read_start if self._is_only_at_start else self._read_text

    def feed(self, text: str) -> AnswerDelta:
        part = AnswerDelta()
        thoughts, text = self._thoughts.feed(text)
        self._add_text(part, thoughts)
        self._buffer += text
        while self._read(part):
            pass
        return part

    def rest(self) -> AnswerDelta:
        part = self.feed("")
        self._add_text(part, self._thoughts.rest())
        if self.call is not None:
            if self.call.name is None:  # the beginning of a call, which is none
                self._add_text(part, self._begun + self.call.rest)
        elif self._begun:
            self._add_text(part, self._begun + self._buffer)
        elif self._read != self._read_between and (not self.count or self._buffer.strip()):
            self._add_text(part, self._buffer)
        self._buffer = ""
        return part

    def _read_text(self, part: AnswerDelta) -> bool:
        """Return text up to a call, without the blanks before it."""
        buffer = self._buffer
        begins = [each for each in (self.form.begin, self.form.bare_begin) if each]
        if self._is_only_at_start and not self.count:
            begins = []
        found = [(buffer.index(begin), begin) for begin in begins if begin in buffer]
        if found:
            size, begin = min(found)
        else:
            size, begin = len(buffer) - max([0, *(overlap(buffer, each) for each in begins)]), ""
        content = buffer[:size].rstrip() if begins else buffer
        self._add_text(part, content)
        end = size + len(begin)
        self._buffer = buffer[end:] if found else buffer[len(content) :]
        if found:
            self._begin_call(buffer[len(content) : end], begin)
        return bool(found)

    def _read_start(self, part: AnswerDelta) -> bool:
        """Find out whether an answer begins with a call."""
        own, begin = self._buffer.lstrip(), self.form.begin or self.form.prefix
        if begin.startswith(own):
            return False
        has_marker, own = own.startswith(begin), own.removeprefix(begin).lstrip()
        if not (own or self.form.begin):
            return False
        if has_marker if self.form.begin else own[0] == "{":
            begun = self._buffer[: len(self._buffer) - len(own)]
            self._buffer = own
            self._begin_call(begun, begin)
        else:
            self._read = self._read_text
        return True

    def _begin_call(self, begun: str, begin: str) -> None:
        """Read a call after `begun`, which ends in a marker, `begin`, and perhaps blanks."""
        form = self.form
        if form.tags is None:
            self.call = JsonCall(form, self.functions, is_first=begin == form.begin)
        else:
            prefix = begin if begin == form.bare_begin else ""
            self.call = TaggedCall(form, form.tags, self.functions, prefix)
        self._begun = begun
        self._read = self._read_call

    def _read_call(self, part: AnswerDelta) -> bool:
        """Return the parts of a call, or take it as text if it is none."""
        call = self.call
        assert call is not None
        had_name, was_complete = call.name is not None, call.is_complete
        arguments = call.read(self._buffer)
        self._buffer = ""
        self._add_call(part, None if had_name else call.name, arguments)
        self.count += call.is_complete and not was_complete
        if call.name is not None:
            self._end_text()
        if not call.is_over:
            return False
        self._begun = "" if call.name is not None else self._begun + call.text
        self._buffer, self.call = call.rest, None
        self._read = self._read_between
        if call.name is None and not call.text:
            self._return_begun(part)
        return True

    def _return_begun(self, part: AnswerDelta) -> None:
        """Return what begins no call, and go on with text."""
        self._add_text(part, self._begun)
        self._begun, self._read = "", self._read_text

    def _read_between(self, part: AnswerDelta) -> bool:
        """Drop what separates calls, or ends them. After other objects of a list it is text."""
        form, buffer = self.form, self._buffer
        own = buffer.lstrip(form.blanks)
        if form.separator and own.startswith(form.separator):
            following = own.removeprefix(form.separator).lstrip()
            if not following:
                return False
            if following[0] == "{":
                self._add_text(part, self._begun)
                self._buffer = following
                self._begin_call(buffer[: -len(following)], form.separator)
                return True
        if self._begun:
            if own:
                self._return_begun(part)
            return bool(own)
        own = own.removeprefix("]").lstrip(form.blanks) if form.is_list else own
        text = own.removeprefix(form.end).lstrip()
        if not text or form.end.startswith(own):
            return False
        self._buffer, self._read = text, self._read_text
        return True


class _Thoughts:
    """Finds where the thoughts end that an answer may begin with."""

    def __init__(self, form: ToolForm, has_begun: bool):
        begin, self._end = form.thoughts  # the end is empty after thoughts, or without any
        self._begin = "" if has_begun else begin  # to be found first; empty: in thoughts
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
        size = len(text) - overlap(text, self._end)
        self._held = text[size:]
        return text[:size], ""

    def rest(self) -> str:
        """Return what is held at the end of an answer."""
        return self._held
