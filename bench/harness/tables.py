"""Formatting of rows for the terminal and for Markdown.

A row is a dict with plain field names; their headings are defined here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

# progress messages, on standard error: standard output is for the table
say = partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True)

HEADINGS = {
    "ms_per_token": "ms/token",
    "min_ms_per_token": "least",
    "max_ms_per_token": "most",
    "expected_ms_per_token": "ms/token, expected",
    "predicted_ms_per_token": "predicted ms/token",
    "plain_ms_per_token": "plain ms/token",
    "ms_per_token_error": "error of ms/token",
    "link_gbps": "link GB/s",
    "link_mb_per_token": "link MB/token",
    "mb_per_verification": "MB per verification",
    "prefill_s": "prefill s",
    "peak_gb": "peak GB",
    "peak_mb_per_rank": "peak MB per rank",
    "planned_mb": "planned MB",
    "device_mb": "device MB",
    "limit_mb": "limit MB",
    "needed_mb": "hidden states + a layer's KV, MB",
    "tokens_per_s": "tokens/s",
    "matmul_share": "share of the matmul rate",
    "wall_over_bound": "wall / max(link, compute)",
    "probability": "planted words' probability",
    "stands": "planted word accepted",
}


def heading(name: str) -> str:
    """Return the heading of a field; an entry of a mapping is named `field.key`."""
    plain = name.removeprefix("setting.").replace("_", " ").replace(".", " ")
    return HEADINGS.get(name, plain)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's fields by name, with mappings flattened and lists left out."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            cells |= {f"{name}.{key}": entry for key, entry in value.items()}
        elif not isinstance(value, list):
            cells[name] = value
    return cells


def cell(value: Any) -> str:
    """Return a value with three or four significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def show(title: str, rows: Sequence[Mapping[str, Any]], hidden: Sequence[str] = ()) -> None:
    """Print rows as a table, without fields that are always empty or in `hidden`."""
    lines = [flat(row) for row in rows]
    filled = dict.fromkeys(name for line in lines for name in line if line[name] is not None)
    shown = [name for name in filled if name not in hidden]
    table = Table()
    for name in shown:
        number = isinstance(lines[0].get(name), int | float)
        table.add_column(heading(name), justify="right" if number else "left")
    for line in lines:
        table.add_row(*(cell(line.get(name)) or "-" for name in shown))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [headings, ["---"] * len(headings), *([cell(value) for value in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]
