"""`--help` in narrow terminals, where columns side by side cannot be read."""

# It is imported for `--help`: nothing but typer and rich.
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

_NARROW = 80  # columns below which a text is printed below a name instead of beside it
_PANEL = "rich_help_panel"


class _NarrowHelp:
    """Help that is readable in a narrow terminal, too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        if (width := Console().width) >= _NARROW:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        else:
            formatter.write("\n".join(_lines(self, ctx, width)) + "\n")


class HelpCommand(_NarrowHelp, TyperCommand):
    """A command."""


class HelpGroup(_NarrowHelp, TyperGroup):
    """A group of commands."""


def _lines(command: Any, ctx: typer.Context, width: int) -> Iterator[str]:
    """Yield the lines of a command's help."""
    yield from _wrapped(command.get_usage(ctx), width)
    for paragraph in (command.help or "").split("\n\n"):
        yield ""
        yield from _wrapped(paragraph, width)
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is not None:
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(param, _PANEL, None) or kind, []).append(record)
    if isinstance(command, HelpGroup):
        for name in command.list_commands(ctx):
            own = command.get_command(ctx, name)
            if own is not None:
                panels.setdefault("Commands", []).append((name, own.get_short_help_str(10_000)))
    for panel, records in panels.items():
        yield from ("", f"{panel}:")
        for name, text in records:
            yield from _wrapped(name, width, "  ")
            yield from _wrapped(text, width, "      ")
    yield ""
    yield from _wrapped(command.epilog or "", width)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text, whose brackets may be escaped for rich."""
    plain = " ".join(text.replace("\\[", "[").split())
    return textwrap.wrap(
        plain, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
