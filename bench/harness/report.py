"""The tables of README and of docs/results, and its picture, anew from the documents there."""

from __future__ import annotations

from bench.harness.plots import draw_slices
from bench.harness.views import RESULTS, filled

FILLED = (RESULTS / "README.md", RESULTS.parents[1] / "README.md")


def main() -> None:
    """Fill in every table, and draw the picture."""
    for path in FILLED:
        text = filled(path.read_text(encoding="utf-8"), path.parent)
        path.write_text(text, encoding="utf-8")
        print(f"tables of {path} filled in")
    picture = RESULTS / "slices-smollm2-cpu.svg"
    draw_slices(picture.with_suffix(".json"), picture)
    print(f"{picture} drawn")
