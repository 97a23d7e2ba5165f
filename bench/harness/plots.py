"""Pictures of measurements, readable at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def plots_of(document: dict[str, Any], stem: Path) -> list[tuple[str, Path]]:
    """Draw what a document has to show, to files whose names begin with `stem`.

    Returns titles and paths.
    """
    rows, found = document.get("rows", []), []

    def draw(title: str, name: str, plot: Any, *data: Rows) -> None:
        path = stem.with_name(f"{stem.name}-{name}.png")
        plot(*data, path)
        found.append((title, path))

    if rows and "peer" in rows[0]:
        draw("ms/token by context and method", "speed", speed_plot, rows)
        if any(row["link_mb_per_token"] for row in rows):
            draw("link bytes per token", "link", link_plot, rows)
        if document.get("rounds"):
            draw("one round", "round", round_plot, document["rounds"])
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


def speed_plot(rows: Rows, path: Path) -> None:
    """Draw a panel a context and a bar a peer, fastest first, ours in colour."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    figure, panels = _pyplot().subplots(
        1, len(contexts), figsize=(6.2 * len(contexts), 6), squeeze=False
    )
    for axes, context in zip(panels[0], contexts, strict=True):
        ran = [row for row in rows if row["context"] == context and row["ms_per_token"]]
        ran.sort(key=lambda row: -row["ms_per_token"])
        colors = ["C0" if row["peer"].startswith("ours") else "0.6" for row in ran]
        bars = axes.barh(
            [row["peer"] for row in ran], [row["ms_per_token"] for row in ran], color=colors
        )
        axes.bar_label(bars, [f"{row['ms_per_token']:,.3g}" for row in ran], padding=3, fontsize=8)
        axes.set(xscale="log", xlabel="ms/token, logarithmic", title=f"{context:,} tokens")
        axes.minorticks_off()
        axes.margins(x=0.15)
    figure.tight_layout()
    _keep(figure, path)


def link_plot(rows: Rows, path: Path) -> None:
    """Draw what crosses the link for a token, by context."""
    figure, axes = _pyplot().subplots(figsize=(8, 4.5))
    for number, peer in enumerate(
        dict.fromkeys(row["peer"] for row in rows if row["link_mb_per_token"])
    ):
        mine = [row for row in rows if row["peer"] == peer and row["link_mb_per_token"]]
        axes.plot(
            [row["context"] for row in mine],
            [row["link_mb_per_token"] for row in mine],
            "o-",
            color=f"C{number}",
            label=peer,
        )
    axes.set(xlabel="context, tokens", ylabel="link MB/token", xscale="log", yscale="log")
    ticks = sorted({row["context"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    _keep(figure, path)


def round_plot(rounds: Rows, path: Path) -> None:
    """Draw a round of each method that drafts: drafting, verification and, beside it, the link."""
    names = [f"{each['peer']}, {each['context']:,}" for each in rounds]
    figure, axes = _pyplot().subplots(figsize=(11, 0.6 + 0.55 * len(rounds)))
    drafts = [each["draft_ms"] for each in rounds]
    places = range(len(rounds))
    axes.barh(places, drafts, height=0.5, color="C2", label="drafting")
    axes.barh(
        places,
        [each["verification_ms"] for each in rounds],
        left=drafts,
        height=0.5,
        color="C0",
        label="verification",
    )
    link = [each["link_ms"] or 0.0 for each in rounds]
    if any(link):
        axes.barh(
            places, link, left=drafts, height=0.16, color="C1", label="of it, the link at its rate"
        )
    for place, each in zip(places, rounds, strict=True):
        end = each["draft_ms"] + each["verification_ms"]
        axes.annotate(f"  {each['drafted']:.0f} drafted", (end, place), va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="ms")
    axes.margins(x=0.12)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    _keep(figure, path)


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
