"""What was measured, as one page for people, with its plots and nothing from elsewhere: `python -m
bench report results/*.json`.

With `--readme README.md` it also fills in that file's tables anew, from the documents in
docs/results.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer

from bench.harness.plots import plots_of
from bench.harness.tables import cell, commit_of, filled, machine_of
from offload.errors import TierForceError

RESULTS, PAGE = (
    Path(__file__).parents[2] / "docs" / "results",
    Path(__file__).with_name("page.html"),
)


def tables_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Every list of rows in a document, without cells that are lists themselves."""
    tables = []
    for name, rows in document.items():
        if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
            continue
        headings = list(
            dict.fromkeys(
                key
                for row in rows
                for key, value in row.items()
                if not isinstance(value, list | dict)
            )
        )
        lines = [
            [(cell(row.get(key)), isinstance(row.get(key), int | float)) for key in headings]
            for row in rows
        ]
        tables.append({"name": name, "headings": headings, "rows": lines})
    return tables


def part(path: Path, folder: Path) -> dict[str, Any]:
    """A document as the page shows it; its plots go to `folder`. Raises TierForceError for a file
    that is no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        environment = document["environment"]
        machine, commit = machine_of(environment), commit_of(environment)
        versions = ", ".join(
            f"{name} {version}" for name, version in environment["versions"].items() if version
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TierForceError(
            f"{path} is not a document that a benchmark wrote ({type(error).__name__}: {error})."
        ) from error
    images = []
    for title, picture in plots_of(document, folder / path.stem):
        images.append((title, base64.b64encode(picture.read_bytes()).decode()))
    settings = ", ".join(
        f"{name} {value}"
        for name, value in document.get("settings", {}).items()
        if value is not None
    )
    ratios = [(claim, cell(value)) for claim, value in document.get("ratios", {}).items()]
    found = {
        "name": path.stem,
        "environment": environment,
        "machine": machine,
        "commit": commit,
        "settings": settings,
    }
    return {
        **found,
        "versions": versions,
        "ratios": ratios,
        "images": images,
        "tables": tables_of(document),
    }


def main(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="JSON documents; by default those in docs/results.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The page; plots go beside it.")] = Path(
        "results/report.html"
    ),
    readme: Annotated[
        Path | None,
        typer.Option(help="A README whose tables are to be filled in from docs/results."),
    ] = None,
) -> None:
    """Make one page of all documents, and README's tables."""
    output.parent.mkdir(parents=True, exist_ok=True)
    paths = documents or sorted(
        RESULTS.glob("*.json"), key=lambda path: (not path.stem.startswith("compare"), path)
    )
    try:
        parts = [part(path, output.parent) for path in paths]
    except TierForceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    page = (
        jinja2.Environment(autoescape=True, trim_blocks=True)
        .from_string(PAGE.read_text(encoding="utf-8"))
        .render(parts=parts)
    )
    output.write_text(page, encoding="utf-8")
    print(f"written to {output}")
    if readme is not None:
        try:
            readme.write_text(filled(readme.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        except (OSError, KeyError) as error:
            typer.echo(f"--readme {readme}: a table cannot be filled in ({error}).", err=True)
            raise typer.Exit(1) from None
        print(f"tables of {readme} filled in")
