"""Values of parameters that are text rather than JSON: their types, and how they are read.

A value is raw text if its schema is a string's. Others are JSON; what is none is a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_MAX_REFERENCES = 20  # one to another
BLANKS = " \t\r\n"  # around JSON
# Python's constants, which chat templates render in earlier calls, and models imitate
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_STRING = frozenset({"string"})
_NUMBER = frozenset({"number", "integer"})
Types = frozenset[str]  # those of JSON Schema


def parameter_types(schema: Mapping[str, Any], name: str) -> Types | None:
    """Return the types that a parameter of a function may have; None if its schema names none."""
    top = resolved(schema, schema)
    properties = top.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return types_of(properties[name], schema)
    return types_of(top.get("additionalProperties"), schema)


def types_of(
    schema: Any, root: Mapping[str, Any], known: dict[Any, Types | None] | None = None
) -> Types | None:
    """Return the types that a schema allows; None if that is not limited, or not known.

    Args:
        schema: the schema.
        root: the one that references are relative to.
        known: the types of references that were followed.
    """
    if not isinstance(schema, Mapping):
        return None
    parts: list[Types | None] = []
    known = {} if known is None else known
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = None  # found by a schema that refers to itself
            known[reference] = types_of(referenced(reference, root), root, known)
        parts.append(known[reference])
    if "type" in schema:
        parts.append(_named_types(schema["type"]))
    if isinstance(schema.get("enum"), list):
        parts.append(_union([value_types(each) for each in schema["enum"]]))
    if "const" in schema:
        parts.append(value_types(schema["const"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list):
            own = [types_of(each, root, known) for each in options]
            parts += own if key == "allOf" else [_union(own)]
    named = [part for part in parts if part is not None]
    return frozenset.intersection(*named) if named else None


def referenced(reference: Any, root: Any) -> Any:
    """Return the schema that a reference within its document names; None without one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with what it refers to in place of the reference."""
    for _ in range(_MAX_REFERENCES):
        target = referenced(schema.get("$ref"), root)
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: own for key, own in schema.items() if key != "$ref"}}
    return schema


def value_types(value: Any) -> Types:
    """Return the types of a value: two for an integer."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int | float):
        is_integer = isinstance(value, int) or value.is_integer()
        return _NUMBER if is_integer else frozenset({"number"})
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return frozenset({names.get(type(value), "")})


def as_json(text: str, types: Types | None) -> str:
    """Return the text of a value as JSON, given the types it may have.

    Text that may be a string is one unless it is JSON of another type that it may have.
    """
    own = text.strip(BLANKS)
    own = CONSTANTS.get(own, own)
    try:
        value = json.loads(own, parse_int=_as_float, parse_float=_as_float, parse_constant=_fail)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types is None or "string" not in types or value_types(value) & types - _STRING:
        return own
    return json.dumps(text, ensure_ascii=False)


def _as_float(digits: str) -> float:
    """Return a number, of any size: Python limits the digits of an integer."""
    return float(digits)


def _fail(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _named_types(types: Any) -> Types | None:
    listed = types if isinstance(types, list) else [types]
    own = {each for each in listed if isinstance(each, str)}
    return frozenset(own | _NUMBER if "number" in own else own)


def _union(parts: list[Types | None]) -> Types | None:
    known = [part for part in parts if part is not None]
    return frozenset[str]().union(*known) if len(known) == len(parts) else None
