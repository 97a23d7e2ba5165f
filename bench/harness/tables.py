"""README's tables, made of the committed JSON documents and of nothing else.

A table stands between `<!-- NAME -->` and `<!-- end -->`, where NAME is one of VIEWS; `python -m
bench report` fills it in anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Kept = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class View:
    """Some columns of a document's rows, by their headings in README."""

    file: str
    columns: Mapping[str, str]  # heading: key
    rows: str = "rows"
    keep: Kept = field(default=lambda row: True)
    claims: str = ""  # how the ratios shown begin


def _own(*names: str) -> dict[str, str]:
    """Columns under their own names."""
    return {name: name for name in names}


_COMPARED = {
    **_own("context"),
    "": "peer",
    **_own(
        "ms/token",
        "least",
        "most",
        "prefill s",
        "tokens per verification",
        "acceptance",
        "link MB/token",
        "peak GB",
    ),
}
_VARIED = {
    **_own("", "predicted ms"),
    "ms here": "ms",
    **_own("acceptance", "tokens per verification"),
}
VIEWS: dict[str, View] = {
    "counts": View(
        "acceptance-cpu.json",
        _own("context", "temperature", "policy", "tokens per verification"),
        rows="counts",
    ),
    "policies": View(
        "acceptance-cpu.json",
        {
            "policy, budget 768": "policy",
            "rejected, refresh every 16 tokens": "rejected @16",
            "every 32": "rejected @32",
            "expected tokens, draft 16": "tokens n=16",
            "draft 32": "tokens n=32",
        },
        rows="policies",
        keep=lambda row: row["context"] == 16_384,
    ),
    "lengths": View(
        "lengths-cpu.json",
        {
            **_own("link GB/s", "policy"),
            "draft lengths": "lengths",
            **_own("ms/token"),
            "expected": "ms/token, expected",
            **_own("tokens per verification"),
        },
        keep=lambda row: row["lengths"] in ("adaptive", "16, 2", "32, 2"),
    ),
    "needle": View(
        "needle-cpu.json",
        {
            **_own("model"),
            "proposed from": "policy",
            **_own("planted words' probability", "planted word stands"),
        },
        rows="needle",
        keep=lambda row: row["policy"].startswith(("full", "window", "static", "mass + ")),
    ),
    "refresh": View(
        "refresh-cpu.json",
        {
            **_own("dtype", "rows", "retrieval cache", "verification ms", "refresh ms"),
            "share": "share of the verification",
        },
        keep=lambda row: not row["retrieval cache"].startswith("static"),
    ),
    "decode": View(
        "decode-cpu.json",
        {
            "": "method",
            **_own("ms/token", "tokens per verification", "acceptance", "link MB/token"),
        },
    ),
    "transfer": View(
        "transfer-cpu.json",
        _own("link GB/s", "link ms", "compute ms", "wall ms", "wall / max(link, compute)"),
    ),
    "prefill": View(
        "prefill-cpu.json",
        {**_own("tokens"), "": "method", **_own("seconds", "tokens/s", "peak MB a rank")},
    ),
    "passes": View(
        "passes-cpu.json",
        {
            **_own("tokens"),
            "read in s": "prefill s",
            "a step": "target 1",
            "17 rows": "target 17",
            "33 rows": "target 33",
            "33 rows and a refresh": "33 and refresh",
            "retrieval, 2 rows": "retrieval 2",
            "draft": "draft 1",
        },
    ),
    "model": View(
        "model-cpu.json",
        {
            **_own("context", "mode", "link GB/s"),
            "resident layers": "resident",
            **_own("budget", "draft"),
            "first token s": "first s",
            "predicted": "said",
            **_own("ms/token"),
            "predicted ": "told",
        },
    ),
    "tune": View("tune-cpu.json", {}),
    "limits": View(
        "limits-cpu.json",
        {
            **_own("context", "mode"),
            "layers on the device": "layers",
            **_own("planned MB"),
            "share of it given": "share",
            **_own("tokens", "ended"),
        },
    ),
    "compare": View(
        "compare-cpu.json",
        _COMPARED | _own("note"),
        keep=lambda row: row["context"] == 65_536,
        claims="65,536",
    ),
    "greedy": View(
        "compare-greedy-cpu.json",
        {
            **_own("context"),
            "": "peer",
            **_own("ms/token"),
            "same text as ours": "same text",
            **_own("note"),
        },
    ),
    "onchip": View(
        "recipe-on-chip-cpu.json",
        {
            **_own(""),
            "published times": "times",
            "predicted times": "times ",
            "ms here": "ms",
            "plain": "plain  ",
            "times": "times  ",
            **_own("acceptance"),
        },
    ),
    "contexts": View(
        "recipe-contexts-cpu.json",
        {
            **_own("", "predicted ms"),
            "plain": "plain ",
            "times": "times ",
            "ms here": "ms",
            "plain ": "plain  ",
            "times ": "times  ",
            **_own("tokens per verification"),
        },
    ),
    "budgets": View("recipe-budgets-cpu.json", _VARIED),
    "temperatures": View("recipe-temperatures-cpu.json", _VARIED),
    "summaries": View(
        "recipe-summaries-cpu.json",
        {
            **_own("", "predicted ms"),
            "ms here": "ms",
            "plain": "plain  ",
            "times": "times  ",
            **_own("first token s"),
        },
    ),
    "offload": View(
        "recipe-offload-cpu.json",
        {
            **_own(""),
            "published": "published ms",
            **_own("plain", "times", "plain is of"),
            "predicted": "predicted ms",
            **_own("plain ", "times ", "measured here", "ms", "plain  ", "times  "),
        },
    ),
}

_BLOCK = re.compile(r"(<!-- ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """README with its tables made anew from the documents in `folder`. Raises KeyError for a table
    nobody knows.
    """
    return _BLOCK.sub(lambda block: block[1] + markdown(VIEWS[block[2]], folder) + block[3], text)


def markdown(view: View, folder: Path) -> str:
    """The table, its ratios, and what was run where and when."""
    found = json.loads((folder / view.file).read_text(encoding="utf-8"))
    lines = []
    if view.columns:
        rows = [row for row in found[view.rows] if view.keep(row)]
        cells = [[cell(row.get(key)) for key in view.columns.values()] for row in rows]
        lines += [
            "| " + " | ".join(each) + " |"
            for each in ([*view.columns], ["---"] * len(view.columns), *cells)
        ]
    ratios = {
        claim: value
        for claim, value in found.get("ratios", {}).items()
        if claim.startswith(view.claims)
    }
    if ratios:
        lines += ["", *(f"- {claim}: **{value:.2f}**" for claim, value in ratios.items())]
    return "\n".join([*lines, "", provenance(found["environment"], view.file), ""])


def provenance(environment: Mapping[str, Any], file: str) -> str:
    """One line: the command, the machine, the day and the commit."""
    when = f"{environment['date'][:10]}, commit {commit_of(environment)}"
    return (
        f"`{environment['command']}` on {machine_of(environment)}, {when} "
        f"([{file}](docs/results/{file}))"
    )


def machine_of(environment: Mapping[str, Any]) -> str:
    return ", ".join(
        [*environment["gpus"], f"{environment['cpu']}, {environment['threads']} threads"]
    )


def commit_of(environment: Mapping[str, Any]) -> str:
    """Short, and whether there were changes on top of it."""
    commit, changes, _ = environment["commit"].partition("+changes")
    return commit[:7] + changes


def cell(value: Any) -> str:
    """A value as people read it: three or four digits."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if value == int(value):
        return f"{int(value):,}"
    digits = next(
        (digits for least, digits in ((1000, 0), (10, 1), (1, 2)) if abs(value) >= least), 3
    )
    return f"{value:,.{digits}f}"
