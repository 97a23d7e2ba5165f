"""The tables of README and docs/results, generated from the committed documents only.

`python -m bench report` regenerates each table between a comment that specifies it and
`<!-- end -->`. The comment names a document, and further lines:

    <!-- table compare-cpu.json
    columns: peer = 65,536 tokens | ms_per_token | prefill_s
    where: context = 65536 | peer = ours: plain or llama.cpp
    rows: key of the list of rows, if not `rows`
    beside: document with rows of the same peers on another machine
    ratios: prefix of the ratios to show, or none
    -->

Columns are fields of a row, each with an optional heading; `beside.` precedes those of the other
document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.tables import flat, heading, markdown

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = (
    *(RESULTS / name for name in ("README.md", "gpu.md", "more.md")),
    RESULTS.parents[1] / "README.md",
)
_BLOCK = re.compile(r"(<!-- table (\S+)\n(.*?)-->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Regenerate every table."""
    for path in PAGES:
        text = filled(path.read_text(encoding="utf-8"), path.parent)
        path.write_text(text, encoding="utf-8")
        print(f"regenerated the tables of {path}")


def filled(text: str, beside: Path = RESULTS, folder: Path = RESULTS) -> str:
    """Return a page with its tables regenerated from the documents in `folder`.

    `beside`: folder of the page, for relative links.
    """
    links = "" if beside == RESULTS else "docs/results/"

    def block(match: re.Match[str]) -> str:
        spec = dict(line.split(": ", 1) for line in match[3].splitlines())
        return match[1] + table(match[2], spec, folder, links) + match[4]

    return _BLOCK.sub(block, text)


def table(file: str, spec: Mapping[str, str], folder: Path, links: str) -> str:
    """Return the table, its ratios, and a caption for each document."""
    document = _read(folder / file)
    other = _read(folder / spec["beside"]) if "beside" in spec else None
    lines = []
    if columns := _pairs(spec.get("columns", "")):
        where = {name: values.split(" or ") for name, values in _pairs(spec.get("where", ""))}
        rows = [flat(row) for row in document[spec.get("rows", "rows")]]
        if other is not None:
            _add_beside(rows, [flat(row) for row in other[spec.get("rows", "rows")]])
        selected = [row for row in rows if all(str(row[name]) in where[name] for name in where)]
        cells = [[row.get(name) for name, _ in columns] for row in selected]
        lines = markdown([words or heading(name) for name, words in columns], cells)
    ratios, start = document.get("ratios", {}), spec.get("ratios", "")
    shown = [claim for claim in ratios if claim.startswith(start)] if start != "none" else []
    if shown:
        lines += ["", *(f"- {claim}: **{ratios[claim]:.2f}**" for claim in shown)]
    lines += ["", caption(document["environment"], links + file)]
    if other is not None:
        lines[-1] += "\\"  # a line break
        lines += [caption(other["environment"], links + spec["beside"])]
    return "\n".join([*lines, ""])


def _read(path: Path) -> dict[str, Any]:
    """Return a document."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _add_beside(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """Add the columns of another document to the rows of the same peer and context."""
    by_peer = {(other["context"], other["peer"]): other for other in others}
    for row in rows:
        for name, value in by_peer.get((row["context"], row["peer"]), {}).items():
            row[f"beside.{name}"] = value


def _pairs(words: str) -> list[tuple[str, str]]:
    """Return the pairs of `name = value | name`; a missing value is empty."""
    parts = [part.partition(" = ") for part in words.split(" | ") if part]
    return [(name, value) for name, _, value in parts]


def caption(environment: Mapping[str, Any], path: str) -> str:
    """Return one line: command, machine, date, commit and document."""
    machine = ", ".join([*environment["gpus"], environment["cpu"]])
    commit, changes, _ = environment["commit"].partition("+changes")  # uncommitted files
    return (
        f"`{environment['command']}` on {machine}, {environment['threads']} threads, "
        f"{environment['date'][:10]}, commit {commit[:7]}{changes} ([{Path(path).name}]({path}))"
    )
