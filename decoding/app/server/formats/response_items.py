"""The output of a response: items with the text and the calls of an answer, as it grows."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from decoding.app.server.formats.replies import token_logprobs
from decoding.app.server.formats.tools import new_call_id
from decoding.app.server.worker.jobs import TextDelta
from decoding.text.tools.parser import BLANK_LINE, AnswerParser, ToolCallDelta

Event = tuple[str, dict[str, Any]]  # its type, without `response.`, and its fields


class _Item(ABC):
    """A part of the output, with its place in it."""

    def __init__(self, prefix: str, index: int):
        self.id, self.index = f"{prefix}_{uuid.uuid4().hex}", index

    @property
    def place(self) -> dict[str, Any]:
        """Return the fields that say which item an event is about."""
        return {"item_id": self.id, "output_index": self.index}

    @abstractmethod
    def as_json(self, status: str) -> dict[str, Any]:
        """Return the item with a status."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """Return the events that precede its content."""

    @abstractmethod
    def closing(self, item: dict[str, Any]) -> list[Event]:
        """Return the events that follow its content, given the whole item."""

    def _about(self, name: str, item: dict[str, Any]) -> Event:
        """Return an event about all of the item."""
        return f"output_item.{name}", {"output_index": self.index, "item": item}


class _Message(_Item):
    """A message with one part: text."""

    def __init__(self, index: int):
        super().__init__("msg", index)
        self._parts: list[TextDelta] = []

    @property
    def place(self) -> dict[str, Any]:
        return {**super().place, "content_index": 0}

    def as_json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_part(TextDelta.joined(self._parts))],
        }

    def opening(self) -> list[Event]:
        item = {**self.as_json("in_progress"), "content": []}
        part = _part(TextDelta(""))
        return [self._about("added", item), ("content_part.added", {**self.place, "part": part})]

    def add(self, part: TextDelta) -> Event:
        """Add text; return its event."""
        self._parts.append(part)
        logprobs = token_logprobs(part.logprobs)
        return "output_text.delta", {**self.place, "delta": part.text, "logprobs": logprobs}

    def closing(self, item: dict[str, Any]) -> list[Event]:
        (part,) = item["content"]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("output_text.done", {**self.place, **done}),
            ("content_part.done", {**self.place, "part": part}),
            self._about("done", item),
        ]


class _Call(_Item):
    """A call of a function."""

    def __init__(self, index: int, name: str):
        super().__init__("fc", index)
        self.is_complete = False  # its arguments are
        self._call_id, self._name = new_call_id(), name
        self._arguments: list[str] = []

    def as_json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def opening(self) -> list[Event]:
        return [self._about("added", self.as_json("in_progress"))]

    def add(self, arguments: str) -> Event:
        """Add a piece of the arguments' JSON; return its event."""
        self._arguments.append(arguments)
        return "function_call_arguments.delta", {**self.place, "delta": arguments}

    def closing(self, item: dict[str, Any]) -> list[Event]:
        done = {name: item[name] for name in ("name", "arguments")}
        return [
            ("function_call_arguments.done", {**self.place, **done}),
            self._about("done", item),
        ]


class OutputItems:
    """The items of an answer. Each call is one; text before, between and after calls is messages'.

    Messages before the last item are complete, and calls that the model finished.
    """

    def __init__(self, calls: AnswerParser | None):
        """`calls` finds the calls in the answer; None if it has none."""
        self._calls = calls
        self._ended: list[dict[str, Any]] = []  # as JSON
        self._last: _Message | _Call | None = None  # the one that grows

    def begin(self) -> list[Event]:
        """Return the first events of an answer that has a token."""
        return self._open(_Message(0)) if self._calls is None else []

    def add(self, part: TextDelta) -> list[Event]:
        """Add the next part of the answer; return its events."""
        if self._calls is None:
            return self._add_text(part)
        return self._add_parts(self._calls.feed(part.text).parts)

    def end(self, is_complete: bool) -> list[Event]:
        """Return the last events. `is_complete`: whether the answer is."""
        events = [] if self._calls is None else self._add_parts(self._calls.rest().parts)
        if self._last is None:
            events += self._open(_Message(0))
        return events + self._close(is_complete)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the items so far."""
        own = [] if self._last is None else [self._last.as_json(self._status(is_complete=False))]
        return self._ended + own

    def _add_parts(self, parts: list[str | ToolCallDelta]) -> list[Event]:
        events = list[Event]()
        for part in parts:
            events += (
                self._add_text(TextDelta(part)) if isinstance(part, str) else self._add_call(part)
            )
        return events

    def _add_text(self, part: TextDelta) -> list[Event]:
        events = list[Event]()
        last = self._last
        if not isinstance(last, _Message):
            events = self._close()
            last = _Message(len(self._ended))
            events += self._open(last)
            if any(item["type"] == "message" for item in self._ended):  # the items separate them
                part = replace(part, text=part.text.removeprefix(BLANK_LINE))
        return [*events, last.add(part)]

    def _add_call(self, part: ToolCallDelta) -> list[Event]:
        events = list[Event]()
        if part.name is not None:
            events = self._close()
            events += self._open(_Call(len(self._ended), part.name))
        assert isinstance(self._last, _Call)
        self._last.is_complete |= part.is_complete
        return [*events, self._last.add(part.arguments)] if part.arguments else events

    def _open(self, item: _Message | _Call) -> list[Event]:
        self._last = item
        return item.opening()

    def _close(self, is_complete: bool = True) -> list[Event]:
        """End the last item, if there is one, in an answer that is complete up to it, or not."""
        if (last := self._last) is None:
            return []
        item = last.as_json(self._status(is_complete))
        self._ended.append(item)
        self._last = None
        return last.closing(item)

    def _status(self, is_complete: bool) -> str:
        """Return the status of the last item in an answer that is complete, or not."""
        if isinstance(self._last, _Call):
            is_complete = self._last.is_complete
        return "completed" if is_complete else "incomplete"


def _part(text: TextDelta) -> dict[str, Any]:
    """Return the part of a message that has its text."""
    return {
        "type": "output_text",
        "annotations": [],
        "logprobs": token_logprobs(text.logprobs),
        "text": text.text,
    }
