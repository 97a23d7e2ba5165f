"""Grammars of answers that call tools, in the form of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from decoding.grammars.grammar import ALL_TOKENS, Grammar, as_llguidance, quoted
from decoding.text.tools.forms import ToolForm
from offload.errors import InvalidRequestError

# a schema with one of these may have properties that `properties` does not name
_OTHER_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties")


@dataclass(frozen=True, kw_only=True)
class ToolCallGrammar(Grammar):
    """Calls of functions with arguments that are valid, or else another answer.

    The source is the schemas of all functions, in JSON.
    """

    form: ToolForm
    names: tuple[str, ...]
    ids: tuple[tuple[str, int], ...] = ()  # the form's markers that are tokens of their own
    has_many: bool = True  # whether an answer may have several calls
    answer: Grammar | None = None  # an answer without calls may match it
    has_text: bool = False  # an answer may have any text without and before calls

    @classmethod
    def of(
        cls, functions: Mapping[str, Mapping[str, Any]], form: ToolForm, **options: Any
    ) -> ToolCallGrammar:
        """Return the grammar of calls of functions, given the schemas of their arguments by name.

        Functions get no arguments that their schema does not name, unless it says so. Raises
        InvalidRequestError for a schema that is nested too deeply.
        """
        try:
            source = json.dumps([_closed(each) for each in functions.values()], ensure_ascii=False)
        except RecursionError:
            raise InvalidRequestError("a JSON schema is nested too deeply.") from None
        return cls(source, form=form, names=tuple(functions), **options)

    def check(self) -> None:
        """Raise InvalidRequestError for a function whose schema is invalid or unsupported."""
        try:
            super(ToolCallGrammar, replace(self, ids=())).check()
        except InvalidRequestError:
            if self.answer is not None:
                self.answer.check()
            for name, schema in zip(self.names, json.loads(self.source), strict=True):
                try:
                    Grammar.json_schema(schema).check()
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"function {name}: {error}") from error
            raise

    def compose(self, in_channels: bool) -> str:
        schemas = map(Grammar.json_schema, json.loads(self.source))
        grammars = {f"tool{index}": each for index, each in enumerate(schemas)}
        if self.answer is not None:
            grammars["answer"] = self.answer
        return as_llguidance("\n".join([ALL_TOKENS, *self._rules()]), grammars)

    def _rules(self) -> Iterator[str]:
        """Yield the rules of an answer, in Lark's syntax."""
        names = range(len(self.names))
        yield f"call: {' | '.join(f'call{index}' for index in names)}"
        for index, name in enumerate(self.names):
            end = '"}"' if self.form.key else ""
            yield f"call{index}: {self._head(name)} @tool{index} {end}"
        yield f"calls: {self._calls()}"
        if self.answer is not None:
            yield "start: calls | @answer"
        elif not self.has_text:
            yield "start: calls"
        else:
            yield from self._with_text()

    def _head(self, name: str) -> str:
        """Return what precedes the arguments of a call, up to them."""
        form = self.form
        if form.key:
            return quoted(f'{{"name": "{name}", "{form.key}": ')
        begin, arguments = map(self._marker, form.markers[:2])
        return f"{begin} {quoted(name)} {arguments}"

    def _calls(self) -> str:
        """Return what calls are: one, or one or more."""
        form = self.form
        begin = self._marker(form.begin) if form.begin else ""
        is_single = not (self.has_many and form.has_many)
        if form.is_list:
            more = "" if is_single else '(", " call)*'
            return f'{begin} " "? "[" call {more} "]"'
        if not form.end:
            return "call" if is_single else "call+"
        call = rf'{begin} "\n" call "\n" {self._marker(form.end)}'
        blank = "" if self._is_begun_by_text else r'"\n"'
        return call if is_single else f"{call} ({blank} {call})*"

    def _with_text(self) -> Iterator[str]:
        """Yield the rules of an answer with calls, text before them, or only text."""
        form, ids = self.form, dict(self.ids)
        if self._is_begun_by_text:
            begin = re.escape(form.begin).replace("/", "\\/")
            yield rf"BEGIN: /(.|\n)*{begin}/ & ~/(.|\n)*{begin}(.|\n)+/"
            yield rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{begin}(.|\n)*/"
            yield "start: calls TEXT? | TEXT"
            return
        # other special tokens, one after another with text between them
        token = ids.get(form.begin or form.prefix)
        others = "<[*]>" if token is None else f"<[^{token}]>"
        rest = f"({others} TEXT)*" if ids else ""
        yield r"TEXT: /(.|\n)*/"
        if form.begin:
            yield f"start: TEXT {rest} calls?"
        else:
            yield r"FIRST: /\s*[^{\s](.|\n)*/"
            yield f"start: calls | FIRST {rest} | "

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


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments, which are an object without others than it names."""
    is_open = "additionalProperties" in schema or any(key in schema for key in _OTHER_PROPERTIES)
    return {"type": "object", **({} if is_open else {"additionalProperties": False}), **schema}
