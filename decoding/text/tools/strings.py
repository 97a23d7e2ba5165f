"""The strings in JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def strings_in(value: Any) -> list[str]:
    """Return all strings in a value of JSON, the names of members among them."""
    found = list[str]()
    _collect(value, found)
    return found


def with_strings(value: Any, strings: Iterator[str]) -> Any:
    """Return a value with other strings, in the order of `strings_in`."""
    if isinstance(value, str):
        return next(strings)
    if isinstance(value, dict):
        return {next(strings): with_strings(own, strings) for own in value.values()}
    if isinstance(value, list):
        return [with_strings(own, strings) for own in value]
    return value


def _collect(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for name, own in value.items():
            found.append(name)
            _collect(own, found)
    elif isinstance(value, list):
        for own in value:
            _collect(own, found)
