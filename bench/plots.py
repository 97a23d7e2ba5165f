"""Pictures of measurements, readable at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def acceptance_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: rejection by tokens since the refresh. Right: tokens per verification by draft length. For the first context of the
    rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    context = rows[0]["context"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6))
    for number, row in enumerate(row for row in rows if row["context"] == context):
        style = {"color": f"C{number}", "label": row["policy"], "linewidth": 2 if "summaries" in row["policy"] else 1.2}
        by_token = row["overlap by tokens since refresh"]
        smooth = [1 - sum(part) / len(part) for part in (by_token[at : at + 4] for at in range(0, len(by_token), 4))]
        left.plot([4 * at + 2.5 for at in range(len(smooth))], smooth, **style)
        lengths = sorted(int(name.removeprefix("tokens n=")) for name in row if name.startswith("tokens n="))
        right.plot(lengths, [row[f"tokens n={length}"] for length in lengths], marker="o", **style)
    left.set(xlabel="tokens since the refresh", ylabel="rejected share of proposals", ylim=(0, None))
    right.set(xlabel="draft length, and tokens between refreshes", ylabel="tokens per verification", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(f"Retrieval policies at equal device memory behind {context:,} tokens")
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, dpi=110)
    print(f"drawn to {path}")
