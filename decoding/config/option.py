"""Declaration of an option: its meaning and bounds, once, beside its default.

Validation, the command line with its help, and docs/options.md are generated from it.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from offload.errors import TierForceError

# help panels; None is the main one
MAIN = None
SAMPLING = "Sampling"
MEMORY = "Machine and memory"
SPECULATION = "For experts: speculation"
PYTHON = "From Python only"
GROUPS = (MAIN, SAMPLING, MEMORY, SPECULATION)


@dataclass(frozen=True)
class Option:
    """Description of a field beyond its name, type and default."""

    help: str  # begins with a sentence that is complete without the name
    group: str | None = MAIN
    unit: str = ""
    scale: float | None = None  # field units per `unit`
    default: str = ""  # meaning of None, in words
    minimum: int | None = None
    maximum: int | None = None
    zero: str = ""  # meaning of 0, in words
    choices: tuple[str, ...] = ()


def option(help: str, *, value: Any = MISSING, **details: Any) -> Any:
    """Return a dataclass field with default `value` that carries an `Option`."""
    return field(default=value, metadata={"option": Option(help, **details)})


def options_of(kind: type) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass that `option` declared, by name."""
    return {each.name: each for each in fields(kind) if "option" in each.metadata}


def option_of(field: Field[Any]) -> Option:
    """Return the option that a field declares."""
    declared = field.metadata["option"]
    assert isinstance(declared, Option)
    return declared


@cache  # planning makes settings for each strategy
def _type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def check_options(settings: Any) -> None:
    """Raise TierForceError for the first value that is invalid for its option."""
    own: Any = type(settings)
    kinds = _type_hints(own)
    for name, declared in options_of(own).items():
        value, option = getattr(settings, name), option_of(declared)
        kind = (kinds[name] | int) if kinds[name] is float else kinds[name]
        if any(get_origin(each) is dict for each in get_args(kind)):
            kind = dict | None  # the class checks the entries
        if not isinstance(value, kind) or (
            isinstance(value, bool) and bool not in (kind, *get_args(kind))
        ):
            raise TierForceError(f"`{name}` must be {kind_in_words(kind)}, found {value!r}.")
        if value is None:
            continue
        if option.choices and value not in option.choices:
            raise TierForceError(f"`{name}` {value} is not known: use {', '.join(option.choices)}.")
        # negated comparisons, so that NaN is rejected, too
        if option.minimum is not None and not value >= option.minimum:
            raise TierForceError(f"`{name}` must be {minimum_in_words(option)}, found {value}.")
        if option.maximum is not None and not value <= option.maximum:
            raise TierForceError(f"`{name}` must be at most {option.maximum}, found {value}.")


def kind_in_words(kind: Any) -> str:
    """Return the name of a field's type for error messages."""
    names = {
        dict: "a dict",
        bool: "true or false",
        float: "a number",
        int: "a whole number",
        str: "a string",
    }
    return next(words for type, words in names.items() if type in (kind, *get_args(kind)))


def minimum_in_words(option: Option) -> str:
    """Return the minimum in words, with the meaning of 0."""
    if option.minimum == 0:
        return f"0 ({option.zero}) or more" if option.zero else "0 or more"
    return f"at least {option.minimum}"
