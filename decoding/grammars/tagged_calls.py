"""Grammars of calls whose parameters are between tags: their rules in Lark's syntax.

A string's value is text without quotes. What a schema requires of it is written as a regular
expression; a schema that cannot be is refused here, and never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from decoding.grammars.grammar import Grammar, quoted
from decoding.grammars.raw_text import ANY_TEXT, LIMITS, RawText, check_keys, literal, raw_text
from decoding.text.tools.forms import Tags, ToolForm
from decoding.text.tools.values import resolved, types_of

_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_KEY = r"[^<>\s]{1,64}"  # one that the schema does not name
_LONG = 1000  # characters; beside excluded strings, longer limits need too much time
_UNLIMITED = RawText(((ANY_TEXT,),))


class TaggedCalls:
    """Makes the rules of calls, and the grammars of values in JSON that they refer to."""

    def __init__(self, form: ToolForm, tags: Tags, marker: Callable[[str], str]):
        """Make rules for a form; `marker` returns a tag as a token, or as a string."""
        self._form, self._tags, self._marker = form, tags, marker
        self._grammars: dict[Grammar, str] = {}  # with their names
        self._names: dict[str, str] = {}  # those of values, by their definitions

    def call(self, rule: str, function: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rule of a call of a function, named `rule`, and those that it refers to.

        Raises ValueError for a schema that is not supported.
        """
        if "$ref" in schema:
            check_keys(schema, {"$ref", "type"})
        top = {key: own for key, own in resolved(schema, schema).items() if key != "$ref"}
        check_keys(top, _OBJECT)
        properties, required = top.get("properties", {}), top.get("required", [])
        if not set(required) <= set(properties):
            raise ValueError("required names what properties does not")
        line, parts = _optional(self._tags.line), list[str]()
        for index, (key, own) in enumerate(properties.items()):
            _check_key(key)
            name = f"{rule}_{index}"
            try:
                value = self._value(own, schema)
            except ValueError as error:
                raise ValueError(f"property {key}: {error}") from error
            yield f"{name}: {self._opening(key)} {value} {line}"
            parts.append(name if key in required else f"{name}?")
        if (others := top.get("additionalProperties", True)) is not False:
            yield from self._other(f"{rule}_other", list(properties), self._value(others, schema))
            parts.append(f"{rule}_other*")
        before, after = self._tags.name
        head, end = quoted(f"{before}{function}{after}{self._tags.line}"), _optional(self._tags.end)
        yield f"{rule}: {head} {' '.join(parts)} {end}"

    @property
    def grammars(self) -> dict[str, Grammar]:
        """Return the grammars that the rules refer to, by name."""
        return {name: each for each, name in self._grammars.items()}

    def values(self) -> Iterator[str]:
        """Yield the rules of the values in all calls."""
        for definition, name in self._names.items():
            yield f"{name}{definition}"

    def _opening(self, key: str) -> str:
        """Return what precedes the value of a parameter."""
        tags = self._tags
        if not tags.value[0]:
            return quoted(f"{tags.key[0]}{key}{tags.key[1]}{tags.pad}")
        before, after = map(self._marker, tags.key)
        return f"{before} {quoted(key)} {self._between(after)}"

    def _between(self, after: str) -> str:
        """Return the tags between a key and its value, of which `after` is the first."""
        return f"{after} {_optional(self._tags.line)} {self._marker(self._tags.value[0])}"

    def _other(self, rule: str, keys: list[str], value: str) -> Iterator[str]:
        """Yield the rules of a parameter that the schema does not name."""
        tags, name = self._tags, rule.upper()
        named = "|".join(map(literal, keys))
        before, after = literal(tags.key[0]), literal(tags.key[1] + tags.pad)
        if tags.value[0]:
            begin, end = map(self._marker, tags.key)
            before = after = ""
            opening = f"{begin} {name} {self._between(end)}"
        else:  # one terminal, as for the keys that the schema names: the longest one matches
            opening = name
        excluded = f" & ~/{before}({named}){after}/" if keys else ""
        yield f"{name}: /{before}{_KEY}{after}/{excluded}"
        yield f"{rule}: {opening} {value} {_optional(tags.line)}"

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the name of the rule of a value and its closing tag."""
        if schema is False:
            raise ValueError("no value is allowed")
        if schema is True or not schema.keys() & LIMITS:
            return self._define(f": {self._raw(_UNLIMITED)}")
        types = types_of(schema, root)
        if types is None or "string" not in types:
            return self._define(f": {self._json(schema, root)}")
        text = raw_text(schema, root)
        in_json = "" if text.in_json is None else f" | {self._json(text.in_json, root)}"
        return self._define(f": {self._raw(text)}{in_json}")

    def _define(self, definition: str, kind: str = "value") -> str:
        """Return the name of a rule, or of a terminal."""
        return self._names.setdefault(definition, f"{kind}{len(self._names)}")

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Return a value in JSON, and its closing tag."""
        own = {key: value for key, value in schema.items() if key in LIMITS}
        if '"$ref"' in json.dumps(own):
            own |= {key: root[key] for key in ("$defs", "definitions") if key in root}
        name = self._grammars.setdefault(Grammar.json_schema(own), f"json{len(self._grammars)}")
        if (closing := self._marker(self._tags.value[1])).startswith("<"):
            return f"@{name} {_optional(self._tags.pad)} {closing}"
        return f"@{name} {quoted(self._tags.pad + self._tags.value[1])}"

    def _raw(self, text: RawText) -> str:
        """Return a value that is text, and its closing tag, which is not in the text."""
        tags, closing = self._tags, literal(self._tags.value[1])
        end = self._marker(tags.value[1])
        is_token = end.startswith("<")
        if not is_token and text.max_length is not None and text.max_length > _LONG:
            pad = f"({literal(tags.pad)})?"
            return self._define(f"[lazy]: /{text.strings[0][0]}{pad}{closing}/")
        ending = literal(tags.pad) + ("" if is_token else closing)
        excluded = [f"{ANY_TEXT}{closing}{ANY_TEXT if is_token else '(?s:.)+'}"]
        if tags.end:  # the end of a call, which ends a value without its tag, too
            call_end = rf"{literal(tags.end)}\s*{literal(self._form.end)}"
            excluded.append(f"{ANY_TEXT}{call_end}{ANY_TEXT}")
        strings = [" & ".join(f"/({each}){ending}/" for each in option) for option in text.strings]
        own = f"({' | '.join(strings)})" + "".join(
            f" & ~/({each}){ending}/" for each in text.excluded
        )
        options = [f"({own})", *(f"/({each}){ending}/" for each in text.others)]
        definition = f": ({' | '.join(options)})" + "".join(f" & ~/{each}/" for each in excluded)
        return f"{self._define(definition, 'TEXT')} {end if is_token else ''}".rstrip()


def _optional(text: str) -> str:
    return quoted(text) if text else ""


def _check_key(key: str) -> None:
    if not key or key != key.strip() or set(key) & set("<>\r\n"):
        raise ValueError(f"the property name {key!r}")
