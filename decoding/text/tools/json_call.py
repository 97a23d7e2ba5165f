"""Calls of tools whose arguments are JSON."""

from __future__ import annotations

import json
from typing import Any

from decoding.text.tools.call import CallReader, Functions
from decoding.text.tools.forms import ToolForm

_KEYS = ("arguments", "parameters")
_MAX_NAME = 400  # characters before the arguments of a call that is no JSON object


class JsonCall(CallReader):
    """Reads a call with arguments in JSON. They are the model's own; cut if the answer is."""

    def __init__(
        self,
        form: ToolForm,
        functions: Functions,
        is_first: bool = False,
        name: str | None = None,
    ):
        """Read a call in a form, or the arguments of one whose name is known.

        `is_first`: it may begin a list.
        """
        super().__init__(functions, self._read_head if name is None else self._read_arguments)
        self.name = name
        self._form, self._may_begin_list = form, form.is_list and is_first
        self._scanner = _ObjectScanner()

    def _read_head(self) -> bool:
        """Read a call up to its arguments, or all of an object with others, or in another order."""
        form = self._form
        assert form.head is not None
        start = _list_start(self.rest) if self._may_begin_list else 0
        match = form.head.match(self.rest, start)
        if match is not None and match[1] in self.functions:
            self.name = match[1]
            self.rest = self.rest[match.end() :]
            self._scanner = _ObjectScanner()
            self._scanner.find_end(match[0] if form.opening else "", 0)
            self._step = self._read_arguments
            return True
        if match is not None and not form.is_list:
            return self._end()
        own = self.rest[start:].lstrip()
        has_name = "{" not in own and len(own) <= _MAX_NAME
        if not (own[:1] in ("", "{") if form.opening else has_name):
            return self._end()
        if not form.opening or not own:
            return False
        seen = max(self._scanner.seen, start)
        end = self._scanner.find_end(self.rest[seen:], 0)
        if end is None:
            self._scanner.seen = len(self.rest)
            return False
        return self._take_object(start, seen + end)

    def _take_object(self, start: int, end: int) -> bool:
        """Take a whole object as a call, if it is one; or as text, if more may follow in a list."""
        call = _call_of(self.rest[start:end], self._form)
        if call is not None and call[0] in self.functions:
            self.name, self._arguments = call
            self.rest = self.rest[end:]
            self.is_complete = True
        elif self._form.is_list:
            self.text, self.rest = self.rest[:end], self.rest[end:]
        return self._end()

    def _read_arguments(self) -> bool:
        end = self._scanner.find_end(self.rest, 1 if self._form.opening else 0)
        self._arguments += self.rest[:end]
        self.rest = "" if end is None else self.rest[end:]
        if end is None:
            return False
        self.is_complete = True
        self._step = self._read_tail if self._form.opening else self._end
        return True

    def _read_tail(self) -> bool:
        """Drop the end of a call's object; some models leave it out."""
        self.rest = self.rest.lstrip()
        if not self.rest:
            return False
        if self.rest[0] == ",":
            self._step = self._read_members
            return True
        self.rest = self.rest.removeprefix("}")
        return self._end()

    def _read_members(self) -> bool:
        """Drop the members of a call's object that follow its arguments."""
        end = self._scanner.find_end(self.rest, 0)
        self.rest = "" if end is None else self.rest[end:]
        return False if end is None else self._end()


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


def _call_of(text: str, form: ToolForm) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is a JSON object; None if it is none.

    If a marker precedes it, it may have no arguments.
    """
    try:
        call: dict[str, Any] = json.loads(text, strict=False)
        if form.opening.startswith('{"NAME"'):
            ((own, value),) = call.items()
            call = {"name": own, "arguments": value}
        name, keys = call.get("name"), [key for key in _KEYS if key in call]
        arguments = call[keys[0]] if keys else None
        if isinstance(arguments, str):  # JSON in a string
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return None
        if not (keys or form.begin):
            return None
        own = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        own.encode()  # raises ValueError for half a character
        return name, own
    except (ValueError, RecursionError):
        return None
