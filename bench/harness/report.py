"""The tables of README and of docs/results, filled in from the documents there."""

from __future__ import annotations

from bench.harness.views import RESULTS, filled

FILLED = (RESULTS / "README.md", RESULTS.parents[1] / "README.md")


def main() -> None:
    """Fill in every table."""
    for path in FILLED:
        text = filled(path.read_text(encoding="utf-8"), path.parent)
        path.write_text(text, encoding="utf-8")
        print(f"tables of {path} filled in")
