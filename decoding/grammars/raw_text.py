"""Values that are text rather than JSON, as regular expressions made from a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from decoding.text.tools.values import BLANKS, Types, referenced, types_of, value_types

ANY_TEXT = "(?s:.)*"
# keywords that limit a string, and those that combine schemas
_STRING_KEYS = frozenset({"minLength", "maxLength", "pattern", "format"})
_VALUE_KEYS = frozenset({"enum", "const"})
_COMBINING = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if"}
)
_NUMBER_KEYS = frozenset(
    {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)
_LIST_KEYS = frozenset(
    {"items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains"}
    | {"minItems", "maxItems", "uniqueItems", "unevaluatedItems"}
)
_OBJECT_KEYS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedProperties"}
)
LIMITS = (
    _STRING_KEYS | _VALUE_KEYS | _COMBINING | _NUMBER_KEYS | _LIST_KEYS | _OBJECT_KEYS | {"type"}
)
_BLANK = f"[{BLANKS}]*".replace("\t", r"\t").replace("\r", r"\r").replace("\n", r"\n")
_INTEGER = "-?(0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"  # a day that every month has
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_CLOCK})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# some of the strings in each format, which are enough for an answer
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+)+",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": "https?:\\/\\/[a-z0-9]+([.-][a-z0-9]+)*(:[0-9]{1,4})?(\\/[A-Za-z0-9._~+,;=@-]*)*"
    "([?][A-Za-z0-9._~+,;=@&-]*)?(#[A-Za-z0-9._~-]*)?",
}
# values of other types, and strings that are read as such
_SCALARS = {
    "null": ("null", "null|None"),
    "boolean": ("true|false", "true|false|True|False"),
    "number": (_NUMBER, _NUMBER),
}
_CONTAINERS = frozenset({"array", "object"})


@dataclass(frozen=True)
class RawText:
    """What a value may be: text, in regular expressions, or JSON."""

    strings: tuple[tuple[str, ...], ...]  # a string matches all of one of these
    excluded: tuple[str, ...] = ()  # strings that would be read as something else
    others: tuple[str, ...] = ()  # values of other types, but for lists and objects
    in_json: dict[str, Any] | None = None  # the schema of lists and objects
    max_length: int | None = None  # the only limit of a string, if there is only one


def check_keys(schema: Mapping[str, Any], allowed: Set[str]) -> None:
    """Raise ValueError for a schema with other limits than the allowed ones."""
    if others := sorted((schema.keys() & LIMITS) - allowed):
        raise ValueError(f"{', '.join(others)}")


def literal(text: str) -> str:
    """Return a regular expression that matches a text, in Lark's syntax."""
    plain = (
        each if each.isascii() and each.isalnum() else rf"\x{{{ord(each):x}}}" for each in text
    )
    return "".join(plain)


def raw_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> RawText:
    """Return what a value may be that may be a string.

    Args:
        schema: its schema.
        root: the schema that references are relative to.

    Raises ValueError for a schema that is not supported.
    """
    leaves = list(_leaves(schema, root, set()))
    strings = [own for own, types in leaves if "string" in types]
    excluded, others = list[str](), list[str]()
    found = frozenset[str]().union(*(types for _, types in leaves))
    for kind, (valid, similar) in _SCALARS.items():
        own_kinds = found & (value_types(0) if kind == "number" else {kind})
        if not own_kinds:
            continue
        widest = "number" if "number" in own_kinds else min(own_kinds)
        own = [leaf for leaf, types in leaves if own_kinds & types]
        free = [leaf for leaf, types in leaves if widest in types and _is_free(leaf)]
        if free:
            others.append(_INTEGER if widest == "integer" else valid)
            continue
        excluded.append(similar)
        others += [literal(json.dumps(each)) for each in _listed(own) if kind in value_types(each)]
    if containers := found & _CONTAINERS:
        excluded.append(rf"[\[{{]{ANY_TEXT}")
    limit = None if excluded else _only_limit(strings)
    if limit is not None and limit >= len("false"):
        others = []  # a string of that length is read as such
    return RawText(
        tuple(map(_string, strings)),
        tuple(f"{_BLANK}({each}){_BLANK}" for each in excluded),
        tuple(others),
        _in_json(leaves) if containers else None,
        limit if not others else None,
    )


def _leaves(
    schema: Any, root: Mapping[str, Any], seen: set[str]
) -> Iterator[tuple[Mapping[str, Any], Types]]:
    """Yield the schemas, with their types, of which a value may match any.

    `seen`: references that were followed; each is once, so that the work is limited.
    """
    while "$ref" in schema:
        check_keys(schema, {"$ref"})
        reference = schema["$ref"]
        if reference in seen or not isinstance(own := referenced(reference, root), Mapping):
            raise ValueError(f"$ref {reference}")
        seen.add(reference)
        schema = own
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list) and (key != "allOf" or len(options) == 1):
            check_keys(schema, {key})
            own = [leaf for each in options for leaf in _leaves(each, root, seen)]
            if key == "oneOf":
                _check_disjoint(own)
            yield from own
            return
    types = types_of(schema, root)
    if types is None:
        raise ValueError("a type is missing")
    if "string" in types:
        check_keys(schema, LIMITS - _COMBINING)
    yield schema, types


def _check_disjoint(leaves: list[tuple[Mapping[str, Any], Types]]) -> None:
    """Raise ValueError if a value may match several of the schemas."""
    listed = [_listed([leaf]) for leaf, _ in leaves]
    if all(listed):
        kinds = [json.dumps(each) for own in listed for each in own]
    else:
        kinds = [
            each for _, types in leaves for each in types if each != "integer" or types == {each}
        ]
        kinds = ["number" if each == "integer" else each for each in kinds]
    if len(set(kinds)) < len(kinds):
        raise ValueError("oneOf with schemas that allow the same types")


def _is_free(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema limits nothing but the type, and strings."""
    return not (schema.keys() & LIMITS) - _STRING_KEYS - {"type"}


def _listed(schemas: list[Mapping[str, Any]]) -> list[Any]:
    """Return the values that schemas list."""
    values = list[Any]()
    for schema in schemas:
        values += schema["enum"] if isinstance(schema.get("enum"), list) else []
        values += [schema["const"]] if "const" in schema else []
    return values


def _in_json(leaves: list[tuple[Mapping[str, Any], Types]]) -> dict[str, Any]:
    """Return the schema of the lists and objects that schemas allow."""
    options = list[dict[str, Any]]()
    for leaf, types in leaves:
        if _VALUE_KEYS & leaf.keys():
            options.append(
                {"enum": [each for each in _listed([leaf]) if isinstance(each, list | dict)]}
            )
        elif own := sorted(types & _CONTAINERS):
            options.append({**leaf, "type": own})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _string(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the expressions that a string matches."""
    if _VALUE_KEYS & schema.keys():
        if not isinstance(schema.get("enum", []), list):
            raise ValueError("enum without a list")
        if schema.keys() & _STRING_KEYS:
            raise ValueError("enum beside other limits of a string")
        return ("|".join(literal(each) for each in _listed([schema]) if isinstance(each, str)),)
    own = list[str]()
    if "minLength" in schema or "maxLength" in schema:
        smallest, largest = schema.get("minLength", 0), schema.get("maxLength", "")
        own.append(f"(?s:.){{{_count(smallest)},{largest if largest == '' else _count(largest)}}}")
    if "pattern" in schema:
        own.append(_pattern(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ValueError(f"format {schema['format']}")
        own.append(_FORMATS[schema["format"]])
    return tuple(own) or (ANY_TEXT,)


def _only_limit(strings: list[Mapping[str, Any]]) -> int | None:
    """Return the maximum length of a string without other limits."""
    if len(strings) == 1 and strings[0].keys() & (_STRING_KEYS | _VALUE_KEYS) == {"maxLength"}:
        return _count(strings[0]["maxLength"])
    return None


def _count(value: Any) -> int:
    if not isinstance(value, int | float) or value < 0 or value != int(value):
        raise ValueError("a length is no natural number")
    return int(value)


def _pattern(pattern: str) -> str:
    """Return the expression of all of a text that has a match of a pattern."""
    from llguidance import regex_to_lark

    options = list[str]()
    for each in _alternatives(pattern):
        core = each.removeprefix("^")
        size = len(core) - len(core.rstrip("\\$"))
        # a dollar sign that no backslash precedes
        is_end = core.endswith("$") and core[len(core) - size : -1].count("\\") % 2 == 0
        core = core[:-1] if is_end else core
        before, after = "" if each.startswith("^") else ANY_TEXT, "" if is_end else ANY_TEXT
        options.append(f"{before}({core}){after}")
    return str(regex_to_lark("|".join(options)))


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern between the bars that are in no group or class."""
    start = depth = index = 0
    in_class = False
    while index < len(pattern):
        each = pattern[index]
        if each == "\\":
            index += 1
        elif in_class:
            in_class = each != "]"
        elif each == "[":
            in_class = True
        elif each in "()":
            depth += 1 if each == "(" else -1
        elif each == "|" and depth == 0:
            yield pattern[start:index]
            start = index + 1
        index += 1
    yield pattern[start:]
