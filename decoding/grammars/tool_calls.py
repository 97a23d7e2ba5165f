"""Grammars of answers that call tools, in the form of the model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decoding.grammars.grammar import (
    ALL_TOKENS,
    Grammar,
    answer_in_channels,
    as_llguidance,
    quoted,
)
from decoding.grammars.tagged_calls import TaggedCalls
from decoding.text.tools.channels import CHANNEL, CONSTRAIN, MESSAGE
from decoding.text.tools.forms import Tags, ToolForm
from offload.errors import InvalidRequestError, one_line

# a schema with one of these may have properties that `properties` does not name
_OTHER_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties")
_ANY_OBJECT = {"type": "object"}
_SEARCH_S = 10.0  # seconds for the search of unsupported schemas


@dataclass(frozen=True, kw_only=True)
class ToolCallGrammar(Grammar):
    """Calls of functions with arguments that are valid, or else another answer.

    The source is the schemas of all functions, in JSON.
    """

    form: ToolForm
    names: tuple[str, ...]
    strict: frozenset[str] = frozenset()  # functions whose arguments must be valid
    ids: tuple[tuple[str, int], ...] = ()  # markers that are tokens of their own
    has_many: bool = True  # whether an answer may have several calls
    answer: Grammar | None = None  # an answer without calls may match it
    has_text: bool = False  # an answer may have any text without and before calls
    is_in_thoughts: bool = False  # the answer begins in a thought

    @classmethod
    def of(
        cls, functions: Mapping[str, Mapping[str, Any]], form: ToolForm, **options: Any
    ) -> ToolCallGrammar:
        """Return the grammar of calls of functions, given the schemas of their arguments by name.

        Functions get no arguments that the properties in their schema do not name, unless it says
        so. Raises InvalidRequestError for a schema that is nested too deeply.
        """
        try:
            source = json.dumps([_closed(each) for each in functions.values()], ensure_ascii=False)
        except RecursionError:
            raise InvalidRequestError("a JSON schema is nested too deeply.") from None
        return cls(source, form=form, names=tuple(functions), **options)

    def check(self) -> None:
        # without tokens, which the checker's tokenizer does not have
        super(ToolCallGrammar, replace(self, ids=())).check()

    def checked(self) -> Grammar:
        """Return the grammar with any object for functions whose schema is not supported.

        Raises InvalidRequestError if one of these is strict, or they are not found in time.
        """
        try:
            return super().checked()
        except InvalidRequestError:
            if self.answer is not None:
                self.answer.check()
            schemas = dict(zip(self.names, json.loads(self.source), strict=True))
            unsupported = self._unsupported(list(schemas), schemas, time.monotonic() + _SEARCH_S)
            for name in sorted(unsupported & self.strict):
                try:
                    Grammar.json_schema(schemas[name]).check()
                    self._only([name], schemas).check()
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"function {name}: {error}") from error
            if not unsupported:  # each by itself is supported
                raise
            own = [_ANY_OBJECT if name in unsupported else schemas[name] for name in schemas]
            relaxed = replace(self, source=json.dumps(own, ensure_ascii=False))
            relaxed.check()
            return relaxed

    def _unsupported(
        self, names: Sequence[str], schemas: Mapping[str, Any], deadline: float
    ) -> set[str]:
        """Return the functions whose schemas are not supported, by bisection."""
        if time.monotonic() > deadline:
            raise InvalidRequestError(
                "checking the schemas of all functions takes too long: send fewer, or smaller ones."
            )
        try:
            self._only(names, schemas).check()
        except InvalidRequestError:
            if len(names) == 1:
                return set(names)
            half = len(names) // 2
            parts = names[:half], names[half:]
            return set[str]().union(*(self._unsupported(part, schemas, deadline) for part in parts))
        return set()

    def _only(self, names: Sequence[str], schemas: Mapping[str, Any]) -> ToolCallGrammar:
        """Return the grammar of calls of some of the functions."""
        own = json.dumps([schemas[name] for name in names], ensure_ascii=False)
        return replace(self, names=tuple(names), source=own, answer=None)

    def compose(self, in_channels: bool) -> str:
        schemas = json.loads(self.source)
        if self.form.tags is not None:
            rules, grammars = self._tagged(self.form.tags, schemas)
        else:
            end = '"}"' if self.form.opening else ""
            own = map(Grammar.json_schema, schemas)
            grammars = {f"tool{index}": each for index, each in enumerate(own)}
            rules = [
                f"call{index}: {self._head(name)} @tool{index} {end}"
                for index, name in enumerate(self.names)
            ]
        if self.answer is not None:
            grammars["answer"] = self.answer
        return as_llguidance("\n".join([ALL_TOKENS, *rules, *self._rules()]), grammars)

    def _tagged(
        self, tags: Tags, schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str], dict[str, Grammar]]:
        """Return the rules of calls between tags, and the grammars that they refer to.

        Raises InvalidRequestError for a schema that is not supported there.
        """
        calls, rules = TaggedCalls(self.form, tags, self._marker), list[str]()
        for index, (name, schema) in enumerate(zip(self.names, schemas, strict=True)):
            try:
                rules += calls.call(f"call{index}", name, schema)
            except (ValueError, TypeError, AttributeError) as error:  # those of a wrong type, too
                raise self.error(f"{one_line(error)} (in calls between tags)") from error
        return [*rules, *calls.values()], calls.grammars

    def _rules(self) -> Iterator[str]:
        """Yield the rules of an answer, in Lark's syntax."""
        yield f"call: {' | '.join(f'call{index}' for index in range(len(self.names)))}"
        yield f"calls: {self._calls()}"
        if self.form.has_channels:
            final = "TEXT" if self.has_text else "@answer" if self.answer is not None else ""
            yield answer_in_channels(final, "calls", self._marker)
            return
        if self.has_text:
            yield from self._with_text()
            return
        thought = ""
        if self.is_in_thoughts:
            thought = "thought"
            yield from self._thought()
        yield f"start: {thought} {'calls' if self.answer is None else '(calls | @answer)'}"

    def _head(self, name: str) -> str:
        """Return what precedes the arguments of a call, up to them."""
        form = self.form
        if form.opening:
            return quoted(form.opening.replace("NAME", name))
        if form.has_channels:
            return self._header(f"{form.begin}{name}")
        begin, arguments = map(self._marker, form.markers[:2])
        return f"{begin} {quoted(name)} {arguments}"

    def _header(self, recipient: str) -> str:
        """Return the header of a message, which has its recipient before or after the channel."""
        channel, message, kind = map(self._marker, (CHANNEL, MESSAGE, CONSTRAIN))
        after = f"{channel} {quoted(f'commentary {recipient}')}"
        before = f'{quoted(f" {recipient}")} {channel} "commentary"'
        return f'({after} | {before}) (" "? {kind}? "json")? {message}'

    def _calls(self) -> str:
        """Return what calls are: one, or one or more."""
        form = self.form
        begin = self._marker(form.begin) if form.begin else ""
        is_single = not (self.has_many and form.has_many)
        if form.is_list:
            more = "" if is_single else '(", " call)*'
            end = self._marker(form.end) if form.end else ""
            end += "?" if end.startswith("<") else ""  # a token that may end the answer, too
            return f'{begin} " "? "[" call {more} "]" {end}'
        if not form.begin:
            token = dict(self.ids).get(form.prefix)
            return "call" if token is None else f"<[{token}]>? call"
        if not form.end:
            return "call" if is_single else "call+"
        inner = quoted(form.inner_line) if form.inner_line else ""
        call = f"{begin} {inner} call {inner} {self._marker(form.end)}"
        if is_single:
            return call
        line = "" if self._is_begun_by_text or not form.line else quoted(form.line)
        return rf'{call} ({line} {call})* "\n"?'

    def _with_text(self) -> Iterator[str]:
        """Yield the rules of an answer with calls, text before them, or only text."""
        form, ids = self.form, dict(self.ids)
        begin = _escaped(form.begin)
        without = rf" & ~/(.|\n)*{begin}(.|\n)*/" if begin else ""
        yield rf"TEXT: /(.|\n)*/{without}"
        if self._is_begun_by_text:
            yield rf"BEGIN: /(.|\n)*{begin}/ & ~/(.|\n)*{begin}(.|\n)+/"
            yield "start: calls TEXT? | TEXT"
            return
        # other special tokens, one after another with text between them
        token = ids.get(form.begin or form.prefix)
        others = "<[*]>" if token is None else f"<[^{token}]>"
        rest = f"({others} TEXT)*" if ids else ""
        if form.begin:
            yield f"start: TEXT {rest} calls?"
        else:
            yield r"FIRST: /\s*[^{\s](.|\n)*/"
            yield f"start: calls | FIRST {rest} | "

    def _thought(self) -> Iterator[str]:
        """Yield the rules of the rest of a thought, and its end."""
        token = dict(self.ids).get(self.form.thoughts[1])
        if token is None:
            end = _escaped(self.form.thoughts[1])
            yield rf"THOUGHT: /(.|\n)*{end}\n*/ & ~/(.|\n)*{end}(.|\n)*[^\n](.|\n)*/"
            yield "thought: THOUGHT"
        else:
            yield r"THOUGHT: /(.|\n)*/"
            yield rf"thought: THOUGHT (<[^{token}]> THOUGHT)* <[{token}]> /\n*/"

    @property
    def _is_begun_by_text(self) -> bool:
        """Return whether text may precede calls that no token of its own begins."""
        begin = self.form.begin
        return self.has_text and bool(begin) and begin not in dict(self.ids)

    def _marker(self, marker: str) -> str:
        if marker == self.form.begin and self._is_begun_by_text:
            return "BEGIN"  # and the text before it
        token = dict(self.ids).get(marker)
        return quoted(marker) if token is None else f"<[{token}]>"


def _escaped(text: str) -> str:
    """Return a text for a regular expression in Lark's syntax."""
    return re.escape(text).replace("/", "\\/")


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments, which are an object without others than it names."""
    says = "additionalProperties" in schema or any(key in schema for key in _OTHER_PROPERTIES)
    is_closed = "properties" in schema and not says
    return {"type": "object", **({"additionalProperties": False} if is_closed else {}), **schema}
