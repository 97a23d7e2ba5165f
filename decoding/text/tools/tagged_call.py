"""Calls of tools whose parameters are between tags."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from decoding.text.tools.call import CallReader, Functions
from decoding.text.tools.forms import Tags, ToolForm
from decoding.text.tools.values import Types, as_json, parameter_types

_NAME = re.compile(r"[\w.:/-]{0,256}")
_MAX_KEY = 256  # characters
_STRING = frozenset({"string"})


class TaggedCall(CallReader):
    """Reads a call with tags. A string is returned as it is generated, another value at its end.

    A value ends at its closing tag if another tag follows, so that it may have that tag itself.
    """

    def __init__(self, form: ToolForm, tags: Tags, functions: Functions, prefix: str = ""):
        """Read a call in a form; `prefix` begins it, and is not part of the text."""
        super().__init__(functions, self._read_name)
        self._form, self._tags, self._prefix = form, tags, prefix
        self._keys = set[str]()  # those of the parameters so far
        self._value = _Value(form, tags, None)  # the one that is being read

    def _read_name(self) -> bool:
        before, after = self._tags.name
        text = (self._prefix + self.rest).lstrip()
        if not text.startswith(before):
            return False if before.startswith(text) else self._end()
        found = _NAME.match(text, len(before))
        name, own = (found[0], text[found.end() :].lstrip()) if found is not None else ("", "")
        following = [after] if after else [self._tags.key[0], self._form.end]
        if not _begins(own, following):
            return False if _may_begin(own, following) else self._end()
        if name not in self.functions:
            return self._end()
        self.name, self.rest = name, own.removeprefix(after)
        self._step = self._read_key
        return True

    def _read_key(self) -> bool:
        """Read the key of a parameter, up to its value, or the end of the call."""
        begin, end = self._tags.key
        own = self.rest.lstrip()
        if own.startswith(begin):
            key, found, text = own.removeprefix(begin).partition(end)
            opening = self._tags.value[0]
            text = text.lstrip() if opening else text
            if found and text.startswith(opening):
                self._begin_value(key.strip(), text.removeprefix(opening))
                return True
            if opening.startswith(text) if found else len(key) <= _MAX_KEY:
                return False
        elif not own or _may_begin(own, [begin, self._tags.end, self._form.end]):
            return False
        # the end, or what does not belong to the call
        self.rest = own.removeprefix(self._tags.end)
        self._arguments += "}" if self._keys else "{}"
        self.is_complete = True
        return self._end()

    def _begin_value(self, key: str, text: str) -> None:
        assert self.name is not None
        self._value = _Value(
            self._form, self._tags, parameter_types(self.functions[self.name], key)
        )
        self._value.is_dropped = key in self._keys  # JSON would have the key twice
        if not self._value.is_dropped:
            separator = ", " if self._keys else "{"
            self._arguments += f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            self._keys.add(key)
        self.rest = text
        self._step = self._read_value

    def _read_value(self) -> bool:
        piece, self.rest = self._value.read(self.rest)
        self._arguments += "" if self._value.is_dropped else piece
        if self._value.is_over:
            self._step = self._read_key
        return self._value.is_over


class _Value:
    """Reads a value, up to what ends it."""

    def __init__(self, form: ToolForm, tags: Tags, types: Types | None):
        """Read a value that may have these types; None: any."""
        self.is_over = self.is_dropped = False
        self._pad, self._ends, self._types = tags.pad, _ends_of(form, tags), types
        self._is_begun = False
        self._seen = 0  # characters that cannot belong to its end

    def read(self, text: str) -> tuple[str, str]:
        """Return its next piece in JSON, and text that is not read yet; `text` begins with it."""
        if not text:
            return "", ""
        is_string, opening = self._types == _STRING, ""
        if not self._is_begun:
            self._is_begun, opening = True, '"' if is_string else ""
            text = text.removeprefix(self._pad)
        matches = [each.pattern.search(text, self._seen) for each in self._ends]
        match = min(filter(None, matches), key=lambda found: found.start(), default=None)
        if match is not None:
            self.is_over = True
            own, rest = text[: match.start()].removesuffix(self._pad), text[match.end() :]
            return f'{opening}{_escaped(own)}"' if is_string else as_json(own, self._types), rest
        size = min(each.beginning(text) for each in self._ends)
        size -= len(self._pad) if self._pad and text[:size].endswith(self._pad) else 0
        if is_string:
            return opening + _escaped(text[:size]), text[size:]
        self._seen = size
        return "", text


@dataclass(frozen=True)
class _ValueEnd:
    """What ends a value: a tag, if one of others follows."""

    tag: str
    following: tuple[str, ...]
    pattern: re.Pattern[str]  # the tag, if it belongs to the value

    def beginning(self, text: str) -> int:
        """Return where it may begin in a text that does not have all of it yet."""
        if (last := text.rfind(self.tag)) >= 0:
            after = text[last + len(self.tag) :].lstrip()
            if not after or _may_begin(after, self.following):
                return last
        return len(text) - overlap(text, self.tag)


@lru_cache(maxsize=8)
def _ends_of(form: ToolForm, tags: Tags) -> tuple[_ValueEnd, ...]:
    """Return what ends a value: its tag, or the end of the call if that is left out."""
    following = tuple(each for each in (tags.key[0], tags.end, form.end, form.begin) if each)
    closing = re.escape(tags.value[1])
    pattern = rf"{closing}(?=\s*(?:{'|'.join(map(re.escape, following))}))"
    ends = [_ValueEnd(tags.value[1], following, re.compile(pattern))]
    if tags.end:
        pattern = rf"(?={re.escape(tags.end)}\s*{re.escape(form.end)})"
        ends.append(_ValueEnd(tags.end, (form.end,), re.compile(pattern)))
    return tuple(ends)


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that a marker begins with."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((each for each in lengths if marker.startswith(text[-each:])), 0)


def _begins(text: str, options: list[str]) -> bool:
    return any(text.startswith(each) for each in options)


def _may_begin(text: str, options: list[str] | tuple[str, ...]) -> bool:
    """Return whether a text is the beginning of one of the options."""
    return any(each.startswith(text) and text != each for each in options)


def _escaped(text: str) -> str:
    """Return a part of a string in JSON, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
