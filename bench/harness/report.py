"""What was measured, as one page for people, with its plots and nothing from elsewhere.

Without arguments it is made of the documents in docs/results, and the tables of README and of
docs/results are filled in anew.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer

from bench.harness.plots import plots_of
from bench.harness.tables import cell, flat, heading
from bench.harness.views import RESULTS, commit_of, filled, machine_of
from offload.errors import TierForceError

PAGE = Path(__file__).with_name("page.html")
FILLED = (RESULTS / "README.md", RESULTS.parents[1] / "README.md")


def tables_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every list of rows in a document, ready for the page."""
    tables = []
    for title, rows in document.items():
        if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
            continue
        lines = [flat(row) for row in rows]
        names = list(dict.fromkeys(name for line in lines for name in line))
        cells = [
            [(cell(line.get(name)), isinstance(line.get(name), int | float)) for name in names]
            for line in lines
        ]
        tables.append({"name": title, "headings": [heading(each) for each in names], "rows": cells})
    return tables


def section(path: Path, folder: Path) -> dict[str, Any]:
    """Return a document as the page shows it; its plots go to `folder`.

    Raises TierForceError for a file that is no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        environment = document["environment"]
        machine, commit = machine_of(environment), commit_of(environment)
        versions = [f"{name} {each}" for name, each in environment["versions"].items() if each]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TierForceError(
            f"{path} is not a document that a benchmark wrote ({type(error).__name__}: {error})."
        ) from error
    settings = document.get("settings", {}).items()
    return {
        "name": path.stem,
        "environment": environment,
        "machine": machine,
        "commit": commit,
        "settings": ", ".join(f"{name} {each}" for name, each in settings if each is not None),
        "versions": ", ".join(versions),
        "ratios": [(claim, cell(each)) for claim, each in document.get("ratios", {}).items()],
        "images": [
            (title, base64.b64encode(picture.read_bytes()).decode())
            for title, picture in plots_of(document, folder / path.stem)
        ],
        "tables": tables_of(document),
    }


def main(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="JSON documents; by default those in docs/results.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The page; plots go beside it. By default in docs/results.")
    ] = None,
) -> None:
    """Make one page of all documents; of those in docs/results also the tables."""
    output = output or (Path("results") if documents else RESULTS) / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    own = sorted(
        RESULTS.glob("*.json"), key=lambda path: (not path.stem.startswith("compare"), path)
    )
    try:
        parts = [section(path, output.parent) for path in documents or own]
    except TierForceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(
        PAGE.read_text(encoding="utf-8")
    )
    output.write_text(template.render(parts=parts), encoding="utf-8")
    print(f"written to {output}")
    for path in FILLED if not documents else ():
        text = filled(path.read_text(encoding="utf-8"), path.parent)
        path.write_text(text, encoding="utf-8")
        print(f"tables of {path} filled in")
