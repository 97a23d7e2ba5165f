"""The picture in docs/results, drawn from a committed document and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

DRAFT = "64"  # tokens a draft


def draw_slices(document: Path, picture: Path) -> None:
    """Draw what a verification yields against what crosses the link, a line for every policy.

    The same document gives the same file, byte for byte.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(document.read_text(encoding="utf-8"))["slices"]
    with pyplot.rc_context({"svg.hashsalt": "tierforce", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(9, 5))
        for policy, points in by_policy(rows).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
        axes.set(
            xscale="log",
            xlabel=f"MB over the link a token, drafts of {DRAFT}, half of the KV on the device",
            ylabel=f"tokens of a verification of {DRAFT}",
        )
        axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def by_policy(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return for each policy its points, by budget: MB over the link, and tokens."""
    ordered = sorted(rows, key=lambda row: (row["policy"], row["budget"]))
    return {
        policy: [(row["link_mb"][DRAFT], row["expected_tokens"][DRAFT]) for row in group]
        for policy, group in groupby(ordered, key=lambda row: row["policy"])
    }
