"""Pictures of acceptance, readable at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def plots_of(document: dict[str, Any], stem: Path) -> list[tuple[str, Path]]:
    """Draw what a document has to show, to files whose names begin with `stem`.

    Returns titles and paths.
    """
    found: list[tuple[str, Path]] = []

    def draw(title: str, name: str, plot: Any, *data: Rows) -> None:
        path = stem.with_name(f"{stem.name}-{name}.png")
        plot(*data, path)
        found.append((title, path))

    if document.get("budgets") and document.get("temperatures"):
        draw(
            "acceptance by budget and temperature",
            "budgets",
            share_plot,
            document["budgets"],
            document["temperatures"],
        )
    if document.get("policies"):
        draw("retrieval policies", "policies", acceptance_plot, document["policies"])
    return found


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _keep(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)


def share_plot(budgets: Rows, temperatures: Rows, path: Path) -> None:
    """Draw the share of proposals that would stand, with a refresh every 16 tokens."""
    figure, panels = _pyplot().subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, rows, key in (
        (panels[0], budgets, "budget"),
        (panels[1], temperatures, "temperature"),
    ):
        for number, policy in enumerate(
            dict.fromkeys(row["policy"].split(", budget")[0] for row in rows)
        ):
            mine = [row for row in rows if row["policy"].split(", budget")[0] == policy]
            axes.plot(
                [row[key] for row in mine],
                [1 - row["rejected"]["16"] for row in mine],
                "o-",
                color=f"C{number}",
                label=policy,
            )
        axes.set(xlabel=key)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="acceptance: sum of min(p, q)")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    _keep(figure, path)


def acceptance_plot(rows: Rows, path: Path) -> None:
    """Draw rejection by tokens since the refresh, and yield by draft length.

    For the first context of the rows.
    """
    context = rows[0]["context"]
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(13, 6))
    for number, row in enumerate(row for row in rows if row["context"] == context):
        style = {
            "color": f"C{number}",
            "label": row["policy"],
            "linewidth": 2 if "summaries" in row["policy"] else 1.2,
        }
        by_token = row["overlap_by_age"]
        smooth = [
            1 - sum(part) / len(part)
            for part in (by_token[at : at + 4] for at in range(0, len(by_token), 4))
        ]
        left.plot([4 * at + 2.5 for at in range(len(smooth))], smooth, **style)
        tokens = row["expected_tokens"]
        right.plot([int(length) for length in tokens], tokens.values(), marker="o", **style)
    left.set(
        xlabel="tokens since the refresh", ylabel="rejected share of proposals", ylim=(0, None)
    )
    right.set(
        xlabel="draft length, and tokens between refreshes",
        ylabel="tokens per verification",
        ylim=(0, None),
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(
        *left.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9, frameon=False
    )
    figure.suptitle(f"Retrieval policies at equal device memory behind {context:,} tokens")
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    _keep(figure, path)
