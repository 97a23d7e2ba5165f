"""Generate docs/options.md from the declarations of fields and commands.

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
    parts += [f"## `tierforce {name}`\n\n{_own(command)}" for name, command in _leaves(commands)]
    codes, _, debug = EXIT_CODES.partition(". ")
    items = codes.removeprefix("Exit codes: ").split("; ")
    lines = "\n".join(f"- {item}" for item in items)
    parts.append(f"## Exit codes and environment\n\n{lines}\n\n{debug}\n")
    return "\n".join(parts)


def _leaves(commands: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield full names and commands, with subcommands in place of their groups."""
    for name, command in commands.items():
        if not (inner := getattr(command, "commands", None)):
            yield name, command
            continue
        for subcommand, command in inner.items():
            yield f"{name} {subcommand}", command


def _shared(group: str | None) -> str:
    rows = [
        _row(kind, field)
        for kind in _KINDS
        for field in options_of(kind).values()
        if option_of(field).group == group
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
    has_shared = "temperature" in {parameter.name for parameter in command.params}
    rows = [
        (
            ", ".join(f"`{name}`" for name in (parameter.opts[0], *parameter.secondary_opts)),
            "required" if parameter.required else _default(parameter.default),
            " ".join((parameter.help or "").split()),
        )
        for parameter in command.params
        if not (has_shared and parameter.name in shared)
    ]
    paragraphs = [textwrap.fill(paragraph, 100) for paragraph in command.help.split("\n\n")]
    return "\n\n".join([*paragraphs, _table(("option", "default", "meaning"), rows)])


def _default(value: Any) -> str:
    if value is True:
        return "yes"
    return "" if value is None or callable(value) else f"`{value}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in lines
    )


if __name__ == "__main__":
    sys.stdout.write(page())
