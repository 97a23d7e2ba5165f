"""What a setting means and what it may be, said once, beside its default.

The checks of values, the command line with its help, and docs/options.md are made from this.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args, get_type_hints

from offload.errors import TierForceError

# the groups of the help; None is what most people need
MAIN = None
SAMPLING = "Sampling"
MEMORY = "Machine and memory"
SPECULATION = "For experts: speculation"
PYTHON = "From Python only"
GROUPS = (MAIN, SAMPLING, MEMORY, SPECULATION)


@dataclass(frozen=True)
class Option:
    """What is said of a field beside its name, type and default."""

    help: str  # starts with a sentence that is complete without the name
    group: str | None = MAIN
    unit: str = ""
    scale: float | None = None  # how many of the field's own units make one of `unit`
    default: str = ""  # what holds where the field is None, in words
    at_least: int | None = None
    at_most: int | None = None
    zero: str = ""  # what 0 stands for
    choices: tuple[str, ...] = ()


def option(help: str, *, value: Any = MISSING, **said: Any) -> Any:
    """Return a dataclass field whose default is `value`, with all that is to be said of it."""
    return field(default=value, metadata={"option": Option(help, **said)})


def options_of(kind: type) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass that were made by `option`, by name."""
    return {each.name: each for each in fields(kind) if "option" in each.metadata}


def about(each: Field[Any]) -> Option:
    """Return what is said of a field."""
    said = each.metadata["option"]
    assert isinstance(said, Option)
    return said


def check_options(settings: Any) -> None:
    """Raise TierForceError for the first value that its option does not allow."""
    kinds = get_type_hints(type(settings))
    for name, each in options_of(type(settings)).items():
        value, said = getattr(settings, name), about(each)
        kind = (kinds[name] | int) if kinds[name] is float else kinds[name]
        if not isinstance(value, kind) or (
            isinstance(value, bool) and bool not in (kind, *get_args(kind))
        ):
            raise TierForceError(f"`{name}` must be {kind_in_words(kind)}, found {value!r}.")
        if value is None:
            continue
        if said.choices and value not in said.choices:
            raise TierForceError(f"`{name}` {value} is not known: use {', '.join(said.choices)}.")
        # said in this form so that a NaN is refused too
        if said.at_least is not None and not value >= said.at_least:
            raise TierForceError(f"`{name}` must be {least_in_words(said)}, found {value}.")
        if said.at_most is not None and not value <= said.at_most:
            raise TierForceError(f"`{name}` must be at most {said.at_most}, found {value}.")


def kind_in_words(kind: Any) -> str:
    """Name the type of a field for people."""
    names = {bool: "true or false", float: "a number", int: "a whole number", str: "a text"}
    return next(words for type, words in names.items() if type in (kind, *get_args(kind)))


def least_in_words(said: Option) -> str:
    """Say what the least value is, and what 0 means."""
    if said.at_least == 0:
        return f"0 ({said.zero}) or more" if said.zero else "0 or more"
    return f"at least {said.at_least}"
