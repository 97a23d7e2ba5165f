"""docs/options.md, generated from the declarations of fields and commands.

python -m decoding.app.options_page > docs/options.md
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field
from typing import Any, get_type_hints

import typer

from decoding.app.commands import app
from decoding.app.options import EXIT_CODES, JobOptions
from decoding.config.option import (
    GROUPS,
    PYTHON,
    kind_in_words,
    minimum_in_words,
    option_of,
    options_of,
)
from decoding.config.settings import Settings
from decoding.speculation.sampling import Sampling

_KINDS = (JobOptions, Sampling, Settings)
_INTRODUCTION = """# Options

`summarize`, `generate`, `chat`, `ask`, `prefill` and `serve` share the options of the first tables;
the options of single commands follow. In Python the same names, with underscores, are fields of
`Settings` and `Sampling`, or arguments of `Engine`, with the same defaults. The engine chooses what
is left out: from the models, the machine, and past requests.

This page is generated: `python -m decoding.app.options_page > docs/options.md`. A test keeps it in
step with the code.
"""


def page() -> str:
    """Return docs/options.md."""
    parts = [_INTRODUCTION]
    for group in (*GROUPS, PYTHON):
        parts.append(f"## {group or 'What most people need'}\n\n{_shared(group)}")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts += [f"## `tierforce {name}`\n\n{_own(each)}" for name, each in _leaves(commands)]
    codes, _, debug = EXIT_CODES.partition(". ")
    items = codes.removeprefix("Exit codes: ").split("; ")
    lines = "\n".join(f"- {item}" for item in items)
    parts.append(f"## Exit codes and environment\n\n{lines}\n\n{debug}\n")
    return "\n".join(parts)


def _leaves(commands: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield commands by name, and subcommands by both names."""
    for name, command in commands.items():
        if not (inner := getattr(command, "commands", None)):
            yield name, command
            continue
        for subcommand, command in inner.items():
            yield f"{name} {subcommand}", command


def _shared(group: str | None) -> str:
    rows = [
        _row(kind, each)
        for kind in _KINDS
        for each in options_of(kind).values()
        if option_of(each).group == group
    ]
    return _table(("option", "values", "default", "meaning"), rows)


def _row(kind: type, field: Field[Any]) -> tuple[str, str, str, str]:
    option = option_of(field)
    flag = f"`{field.name}`" if option.group == PYTHON else f"`--{field.name.replace('_', '-')}`"
    default = option.default or f"`{field.default}`"
    if field.default is MISSING:
        default = "required"
    return flag, _values(kind, field), default, option.help


def _values(kind: type, field: Field[Any]) -> str:
    """Return the valid values of an option, in words."""
    option = option_of(field)
    if option.choices:
        return ", ".join(option.choices)
    hint = get_type_hints(kind)[field.name]
    if hint == bool | None and option.group != PYTHON:
        return "on, off"
    words = option.unit or kind_in_words(hint)
    if option.scale is not None:
        return f"{words}, above 0"
    if option.minimum is not None:
        words += f", {minimum_in_words(option)}"
    if option.maximum is not None:
        words += f", at most {option.maximum}"
    return words


def _own(command: Any) -> str:
    """Return a command's help and a table of its own options."""
    shared = {name for kind in _KINDS for name in options_of(kind)}
    shares = "temperature" in {each.name for each in command.params}
    rows = [
        (
            ", ".join(f"`{name}`" for name in (each.opts[0], *each.secondary_opts)),
            "required" if each.required else _default(each.default),
            " ".join((each.help or "").split()),
        )
        for each in command.params
        if not (shares and each.name in shared)
    ]
    paragraphs = [textwrap.fill(each, 100) for each in command.help.split("\n\n")]
    return "\n\n".join([*paragraphs, _table(("option", "default", "meaning"), rows)])


def _default(value: Any) -> str:
    if value is True:
        return "yes"
    return "" if value is None or callable(value) else f"`{value}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(each.replace('|', '&#124;') for each in row)} |\n" for row in lines
    )


if __name__ == "__main__":
    sys.stdout.write(page())
