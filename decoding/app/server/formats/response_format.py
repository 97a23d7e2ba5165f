"""Formats of an answer that a request may ask for, as grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.grammars.grammar import Grammar

_FIELDS = {  # keys: types
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema"),
}
_JSON_SCHEMA = ("name", "description", "schema", "strict")  # fields; all but schema are ignored
_MAX_CHOICES = 10_000
_MAX_NAME, _MAX_DESCRIPTION = 64, 10_000  # characters of those of a schema that are returned


@dataclass(frozen=True)
class TextFormat:
    """The field `text.format` of the Responses API."""

    source: dict[str, Any]  # its JSON, without null
    grammar: Grammar | None  # None: any text


def parse_response_format(value: Any) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`, None for text. Raises ValueError."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError("type must be text, json_object or json_schema")
    _check_fields(value, _FIELDS[kind])
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's may have a schema
        own = value.get("schema")
        return Grammar.json_object() if own is None else _schema(own)
    own = value.get("json_schema")
    if not isinstance(own, dict) or "schema" not in own:
        raise ValueError("json_schema must be an object with a schema")
    _check_fields(own, _JSON_SCHEMA)
    return _schema(own["schema"])


def parse_text_format(value: Any) -> TextFormat | None:
    """Return the Responses API's `text.format`. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        grammar = parse_response_format(value)
    else:
        grammar = _named_schema({key: own for key, own in value.items() if key != "type"})
    return TextFormat({key: own for key, own in value.items() if own is not None}, grammar)


def _named_schema(own: dict[str, Any]) -> Grammar:
    """Return the grammar of a schema with a name, which are returned as they are."""
    _check_fields(own, _JSON_SCHEMA)
    name, description, schema = own.get("name"), own.get("description") or "", own.get("schema")
    if not isinstance(schema, dict):
        raise ValueError("json_schema needs a schema, which is an object")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise ValueError(f"json_schema needs a name of 1 to {_MAX_NAME} characters")
    if not isinstance(description, str) or len(description) > _MAX_DESCRIPTION:
        raise ValueError(f"a description is a string of up to {_MAX_DESCRIPTION:,} characters")
    if not isinstance(own.get("strict"), bool | None):
        raise ValueError("strict must be true or false")
    return Grammar.json_schema(schema)


def parse_structured_outputs(value: Any) -> Grammar | None:
    """Return the grammar of vLLM's `structured_outputs`. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with one of {', '.join(_STRUCTURED)}")
    _check_fields(value, tuple(_STRUCTURED))
    given = {name: each for name, each in value.items() if each is not None}
    if len(given) != 1:
        raise ValueError(f"needs exactly one of {', '.join(_STRUCTURED)}, found {len(given)}")
    ((name, own),) = given.items()
    return _STRUCTURED[name](own)


def _check_fields(value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, own in value.items():
        if own is not None and name not in known:
            raise ValueError(f"{name[:100]!a} is not supported by this server: leave it out")


def _schema(value: Any) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("the string of a schema is not JSON") from None
    if not isinstance(value, dict | bool):
        raise ValueError("a schema must be an object or a boolean")
    return Grammar.json_schema(value)


def _json_object(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise ValueError("json_object must be true or false")
    return Grammar.json_object() if value else None


def _regex(value: Any) -> Grammar:
    return Grammar.regex(_string(value, "regex"))


def _choice(value: Any) -> Grammar:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_CHOICES:
        raise ValueError(f"choice must be a list of 1 to {_MAX_CHOICES:,} strings")
    return Grammar.choice([_string(each, "choice") for each in value])


def _grammar(value: Any) -> Grammar:
    source = _string(value, "grammar")
    if "::=" in source:
        raise ValueError("GBNF is not supported: write the grammar in Lark's syntax")
    return Grammar(source, is_schema=False)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must have strings, none of them empty")
    return value


_STRUCTURED: Mapping[str, Callable[[Any], Grammar | None]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
