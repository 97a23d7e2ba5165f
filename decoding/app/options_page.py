"""docs/options.md, made from what the fields and commands say of themselves.

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
from decoding.config.option import GROUPS, PYTHON, about, kind_in_words, least_in_words, options_of
from decoding.config.settings import Settings
from decoding.speculation.sampling import Sampling

_KINDS = (JobOptions, Sampling, Settings)
_INTRODUCTION = """# Options

`summarize`, `generate`, `chat`, `ask`, `read` and `serve` share the options of the first tables;
what each command adds follows. From Python the same names, with underscores, are fields of
`Settings` and of `Sampling`, or arguments of `Engine`, with the same defaults. What is left out is
chosen by the engine: from the models, the machine, and the texts before.

This page is generated: `python -m decoding.app.options_page > docs/options.md`. A test holds it to
the code.
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
    """Yield the commands by name, and those of groups by both names."""
    for name, command in commands.items():
        if not (inner := getattr(command, "commands", None)):
            yield name, command
            continue
        for own, each in inner.items():
            yield f"{name} {own}", each


def _shared(group: str | None) -> str:
    rows = [
        _row(kind, each)
        for kind in _KINDS
        for each in options_of(kind).values()
        if about(each).group == group
    ]
    return _table(("option", "values", "default", "meaning"), rows)


def _row(kind: type, each: Field[Any]) -> tuple[str, str, str, str]:
    said = about(each)
    flag = f"`{each.name}`" if said.group == PYTHON else f"`--{each.name.replace('_', '-')}`"
    default = said.default or f"`{each.default}`"
    if each.default is MISSING:
        default = "must be given"
    return flag, _values(kind, each), default, said.help


def _values(kind: type, each: Field[Any]) -> str:
    """Say what an option may be."""
    said = about(each)
    if said.choices:
        return ", ".join(said.choices)
    words = said.unit or kind_in_words(get_type_hints(kind)[each.name])
    if said.scale is not None:
        return f"{words}, above 0"
    if said.at_least is not None:
        words += f", {least_in_words(said)}"
    if said.at_most is not None:
        words += f", at most {said.at_most}"
    return words


def _own(command: Any) -> str:
    """Return a command's help, and the options that it does not share."""
    shared = {name for kind in _KINDS for name in options_of(kind)}
    shares = "temperature" in {each.name for each in command.params}
    rows = [
        (
            ", ".join(f"`{name}`" for name in (each.opts[0], *each.secondary_opts)),
            "must be given" if each.required else _default(each.default),
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
