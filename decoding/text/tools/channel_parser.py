"""Calls of tools in gpt-oss's response format, whose answers have channels."""

from __future__ import annotations

import re

from decoding.text.tools.call import Functions
from decoding.text.tools.channels import CHANNEL, END, FINAL, MESSAGE, PLACEHOLDERS, START
from decoding.text.tools.forms import HARMONY
from decoding.text.tools.json_call import JsonCall
from decoding.text.tools.parser import AnswerDelta, AnswerParser

_START, _CHANNEL, _MESSAGE, _END = map(PLACEHOLDERS.__getitem__, (START, CHANNEL, MESSAGE, END))
_ALL_MARKERS = "".join(PLACEHOLDERS.values())
_MARKER = re.compile(f"([{_ALL_MARKERS}])")
_RECIPIENT = re.compile(rf"to=(?:functions\.)?([^\s<{_ALL_MARKERS}]+)")
_NAME = re.compile(rf"{_CHANNEL}\s*(\w+)")  # a channel's
_TO = "to="


class ChannelParser(AnswerParser):
    """Separates the text of an answer with channels, and placeholders of its markers.

    Text is the final channel's, and comments for the user, which precede a call; the rest is
    dropped. A call is a message to a function, whose arguments are the model's own JSON. The header
    of the first message may begin in the prompt.

    Source: OpenAI 2025, harmony response format, github.com/openai/harmony, docs/format.md.
    """

    def __init__(self, functions: Functions, max_calls: int | None = None):
        """Find calls of functions; those after `max_calls` are dropped."""
        self.functions, self.max_calls = functions, max_calls
        self._header: str | None = ""  # the message's; None in its text
        self._is_marked = False  # whether the header has a marker: else it may be text
        self._is_shown = True  # whether the message is text for the user
        self._name = ""  # the function that the message is for, before its text

    def feed(self, text: str) -> AnswerDelta:
        part = AnswerDelta()
        for piece in filter(None, _MARKER.split(text)):
            if piece in _ALL_MARKERS:
                self._begin_or_end(piece, part)
            elif self._header is None:
                self._read_message(piece, part)
            else:
                self._header += piece
                self._check_header(part)
        return part

    def rest(self) -> AnswerDelta:
        part = AnswerDelta()
        if self._header is not None and not self._is_marked:
            self._add_text(part, self._header)
        return part

    def _begin_or_end(self, marker: str, part: AnswerDelta) -> None:
        if marker == _MESSAGE:
            self._begin_message(self._header or "")
        elif marker == _END:
            self._begin_message("")  # no message: its text is dropped
        else:
            self._header = "" if marker == _START else (self._header or "") + marker
            self._is_marked = True

    def _check_header(self, part: AnswerDelta) -> None:
        """Return what begins an answer as text, unless it names a recipient."""
        own = (self._header or "").lstrip()
        if not (self._is_marked or own.startswith(_TO) or _TO.startswith(own)):
            self._add_text(part, self._header or "")
            self._header = None

    def _begin_message(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _NAME.search(header)
        name = recipient[1] if recipient is not None else ""
        self._header, self._name = None, name if name in self.functions else ""
        shown = (FINAL, "commentary") if recipient is None else (FINAL,)
        self._is_shown = channel is not None and channel[1] in shown
        self.count += self.call is not None
        self.call = None
        self._end_text()

    def _read_message(self, text: str, part: AnswerDelta) -> None:
        """Return more of a message: text, or a part of a call, whose arguments are an object."""
        name = None
        if self._name:
            text = text.lstrip()
            if text.startswith("{"):
                name, self.call = self._name, JsonCall(HARMONY, self.functions, name=self._name)
            self._name = "" if text else self._name
        if self.call is None:
            self._add_text(part, text if self._is_shown else "")
        elif not self.call.is_over:
            self._add_call(part, name, self.call.read(text))
