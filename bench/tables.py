"""README's tables, made of the committed JSON documents and of nothing else.

A table stands between `<!-- NAME -->` and `<!-- end -->`, where NAME is one of VIEWS; `python -m bench.report` fills it in anew.
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


_COMPARED = {
    "context": "context",
    "": "peer",
    "ms/token": "ms/token",
    "prefill s": "prefill s",
    "tokens per verification": "tokens per verification",
    "acceptance": "acceptance",
    "link MB/token": "link MB/token",
    "peak GB": "peak GB",
}
VIEWS: dict[str, View] = {
    "counts": View(
        "acceptance-cpu.json",
        {
            "context": "context",
            "temperature": "temperature",
            "policy": "policy",
            "tokens per verification": "tokens per verification",
        },
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
            "link GB/s": "link GB/s",
            "policy": "policy",
            "draft lengths": "lengths",
            "ms/token": "ms/token",
            "expected": "ms/token, expected",
            "tokens per verification": "tokens per verification",
        },
        keep=lambda row: row["lengths"] in ("adaptive", "16, 2", "32, 2"),
    ),
    "needle": View(
        "needle-cpu.json",
        {
            "model": "model",
            "proposed from": "policy",
            "planted words' probability": "planted words' probability",
            "planted word stands": "planted word stands",
        },
        rows="needle",
        keep=lambda row: row["policy"].startswith(("full", "window", "static", "mass + ")),
    ),
    "refresh": View(
        "refresh-cpu.json",
        {
            "dtype": "dtype",
            "rows": "rows",
            "retrieval cache": "retrieval cache",
            "verification ms": "verification ms",
            "refresh ms": "refresh ms",
            "share": "share of the verification",
        },
        keep=lambda row: not row["retrieval cache"].startswith("static"),
    ),
    "decode": View(
        "decode-cpu.json",
        {
            "": "method",
            "ms/token": "ms/token",
            "tokens per verification": "tokens per verification",
            "acceptance": "acceptance",
            "link MB/token": "link MB/token",
        },
    ),
    "transfer": View(
        "transfer-cpu.json",
        {
            "link GB/s": "link GB/s",
            "link ms": "link ms",
            "compute ms": "compute ms",
            "wall ms": "wall ms",
            "wall / max(link, compute)": "wall / max(link, compute)",
        },
    ),
    "prefill": View(
        "prefill-cpu.json",
        {"tokens": "tokens", "": "method", "seconds": "seconds", "tokens/s": "tokens/s", "peak MB a rank": "peak MB a rank"},
    ),
    "passes": View(
        "passes-cpu.json",
        {
            "tokens": "tokens",
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
            "context": "context",
            "mode": "mode",
            "link GB/s": "link GB/s",
            "resident layers": "resident",
            "budget": "budget",
            "draft": "draft",
            "first token s": "first s",
            "predicted": "said",
            "ms/token": "ms/token",
            "predicted ": "told",
        },
    ),
    "tune": View("tune-cpu.json", {}),
    "limits": View(
        "limits-cpu.json",
        {
            "context": "context",
            "mode": "mode",
            "layers on the device": "layers",
            "planned MB": "planned MB",
            "share of it given": "share",
            "tokens": "tokens",
            "ended": "ended",
        },
    ),
    "compare": View("compare-cpu.json", _COMPARED | {"note": "note"}, keep=lambda row: row["context"] == 65_536),
    "longest": View("compare-64k-cpu.json", _COMPARED),
    "greedy": View(
        "compare-greedy-cpu.json",
        {"context": "context", "": "peer", "ms/token": "ms/token", "same text as ours": "same text", "note": "note"},
    ),
    "offload": View(
        "recipe-offload-cpu.json",
        {
            "": "",
            "published": "published ms",
            "plain": "plain",
            "times": "times",
            "plain is of": "plain is of",
            "predicted": "predicted ms",
            "plain ": "plain ",
            "times ": "times ",
            "measured here": "measured here",
            "ms": "ms",
            "plain  ": "plain  ",
            "times  ": "times  ",
        },
    ),
}

_BLOCK = re.compile(r"(<!-- ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """README with its tables made anew from the documents in `folder`. Raises KeyError for a table nobody knows."""
    return _BLOCK.sub(lambda block: block[1] + markdown(VIEWS[block[2]], folder) + block[3], text)


def markdown(view: View, folder: Path) -> str:
    """The table, its ratios, and what was run where and when."""
    found = json.loads((folder / view.file).read_text(encoding="utf-8"))
    lines = []
    if view.columns:
        rows = [row for row in found[view.rows] if view.keep(row)]
        cells = [[cell(row.get(key)) for key in view.columns.values()] for row in rows]
        lines += ["| " + " | ".join(each) + " |" for each in ([*view.columns], ["---"] * len(view.columns), *cells)]
    if found.get("ratios"):
        lines += ["", *(f"- {claim}: **{value:.2f}**" for claim, value in found["ratios"].items())]
    return "\n".join([*lines, "", provenance(found["environment"], view.file), ""])


def provenance(environment: Mapping[str, Any], file: str) -> str:
    """One line: the command, the machine, the day and the commit."""
    when = f"{environment['date'][:10]}, commit {commit_of(environment)}"
    return f"`{environment['command']}` on {machine_of(environment)}, {when} ([{file}](docs/results/{file}))"


def machine_of(environment: Mapping[str, Any]) -> str:
    return ", ".join([*environment["gpus"], f"{environment['cpu']}, {environment['threads']} threads"])


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
    digits = next((digits for least, digits in ((1000, 0), (10, 1), (1, 2)) if abs(value) >= least), 3)
    return f"{value:,.{digits}f}"
