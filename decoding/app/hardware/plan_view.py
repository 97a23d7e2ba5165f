"""A plan for people, as tables and as a picture: how long a text takes, and where memory goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from decoding.app.terminal.streams import printable
from decoding.planning.what_if import PlanReport
from offload.errors import TierForceError

# what device memory is for, in words
_TIERS = {
    "weights": "weights",
    "resident layers": "KV that stays here",
    "ring, in prefill one layer": "KV on its way",
    "recent tokens": "KV of recent tokens",
    "high_bytes": "high bytes of split KV",
    "joining slices": "joining codes and the rest",
    "cutting slices": "cutting KV in slices",
    "retrieval cache": "retrieval cache",
    "draft cache": "KV of the draft model",
    "rotary tables": "tables of positions",
    "hidden states": "the prompt's hidden states",
    "a pass": "working memory",
}
_BOUNDS = {
    "link": "the link to host memory",
    "compute": "the GPU",
    "arithmetic": "the GPU",
    "sums over ranks": "sums between GPUs",
    "write-back": "the link to host memory",
}


def times_table(
    ahead: PlanReport, others: Sequence[PlanReport], shared: PlanReport, first: PlanReport
) -> Table:
    """Return how long the text takes, beside other modes, each in a plan of its own.

    `shared` is the same text as one of several, `first` as the first one of a run.
    """
    seen, mode = ahead.forecast, ahead.needs.mode
    title = f"Fits {escape(printable(ahead.hardware.name))}. Predicted, not measured:"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("waits for")
    table.add_row(f"a document of {ahead.prompt:,} tokens", duration(seen.document_s))
    table.add_row("  reading it", duration(seen.prefill_s), _BOUNDS[seen.prefill_bound])
    table.add_row(
        f"  writing {ahead.new:,} tokens", duration(seen.decode_s), _BOUNDS[seen.verification_bound]
    )
    if first.choice.strategy != ahead.choice.strategy:
        table.add_row("the first document of a run", duration(first.forecast.document_s))
    texts = shared.forecast.concurrency
    concurrency = f", {texts} at once" if texts > 1 else ""
    an_hour = float(f"{shared.forecast.documents_per_hour:.3g}")
    table.add_row(f"documents an hour{concurrency}", f"{an_hour:,.10g}")
    table.add_row(f"a token, {mode}", f"{1e3 * seen.token_s:,.0f} ms")
    if mode != "plain":
        times = {each.needs.mode: f"{1e3 * each.forecast.token_s:,.0f} ms" for each in others}
        for other, time in {"plain": "does not fit", **times}.items():
            table.add_row(f"a token, {other}", time)
        table.add_row(
            "tokens drafted and gained, a round",
            f"{seen.num_draft_tokens}, {seen.tokens_per_verification:.1f}",
        )
    plan = ahead.plan
    if ahead.needs.retrieval_layers(ahead.needs.planned_spec(plan, ahead.prompt)):
        table.add_row("retrieval budget", f"{ahead.needs.budget:,} tokens")
    table.add_row(
        "layers with KV on the GPU, on the host", f"{plan.resident_layers}, {ahead.layers_on_host}"
    )
    if plan.split_layers:
        table.add_row("  of these with codes on the GPU", f"{plan.split_layers}")
    return table


def memory_table(ahead: PlanReport) -> Table:
    """Return where memory goes, in GB, while the prompt is read and while tokens are written."""
    machine, ranks = ahead.hardware, ahead.needs.ranks
    each = "each GPU" if ranks > 1 else "the GPU"
    table = Table(title=f"GB of {each}, while", title_justify="left", box=None)
    table.add_column("")
    table.add_column("reading", justify="right")
    table.add_column("writing", justify="right")
    phases = (ahead.prefill_memory, ahead.decode_memory)
    for name in ahead.prefill_memory:
        if any(phase[name] for phase in phases):
            table.add_row(_TIERS.get(name, name), *(_gb(phase[name]) for phase in phases))
    table.add_section()
    table.add_row(
        f"in all, of {_gb(machine.device_memory)}", *(_gb(sum(phase.values())) for phase in phases)
    )
    host = _gb(ahead.plan.host_bytes * ranks)
    table.add_row(f"host memory, of {_gb(machine.host_memory)}", host, host)
    return table


def duration(seconds: float) -> str:
    """Return a time as people write it: 0.41 s, 12 s, 1 min 52 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plan_picture(path: Path, model: str, ahead: PlanReport) -> None:
    """Draw memory by tier, and one round of decoding on the link and on the device.

    Raises TierForceError where it cannot be drawn or written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise TierForceError("--plot needs matplotlib: pip install 'tierforce[bench]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), width_ratios=(2, 3))
    _draw_memory(left, ahead)
    _draw_round(right, ahead)
    figure.suptitle(
        f"{model}, {ahead.prompt:,} + {ahead.new} tokens on {ahead.hardware.name}, "
        f"{ahead.needs.mode}"
    )
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise TierForceError(f"--plot {path} cannot be written ({error}).") from error
    pyplot.close(figure)


def _draw_memory(axes: Any, ahead: PlanReport) -> None:
    """Draw the bytes of a device in both phases, and of a rank's share of the host, as bars."""
    phases = (ahead.prefill_memory, ahead.decode_memory)
    bottoms = [0.0, 0.0]
    shown = [name for name in ahead.prefill_memory if any(phase[name] for phase in phases)]
    for number, name in enumerate(shown):
        heights = [phase[name] / 1e9 for phase in phases]
        axes.bar(
            ["GPU, reading", "GPU, writing"],
            heights,
            bottom=bottoms,
            color=f"C{number}",
            label=_TIERS.get(name, name),
            width=0.6,
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    host = ahead.plan.host_bytes / 1e9
    axes.bar(["host"], [host], color="0.6", label="KV on the host", width=0.6)
    _draw_limit(axes, (-0.4, 1.4), ahead.hardware.device_memory)
    _draw_limit(axes, (1.6, 2.4), ahead.hardware.host_memory / ahead.needs.ranks)
    axes.set(ylabel="GB of one rank", title="memory")
    axes.legend(fontsize=8, frameon=False)


def _draw_limit(axes: Any, span: tuple[float, float], nbytes: float) -> None:
    """Draw how much memory there is."""
    height = nbytes / 1e9
    axes.hlines(height, *span, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"there is {height:.3g}",
        (span[0], height),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )


def _draw_round(axes: Any, ahead: PlanReport) -> None:
    """Draw the milliseconds of one round, on the link and on the GPU."""
    seen = ahead.forecast
    drafting = 1e3 * seen.drafting_s
    spans = [
        ("GPU", 0.0, drafting, "C2", f"{seen.num_draft_tokens} drafted"),
        ("GPU", drafting, 1e3 * seen.compute_s, "C0", "verification, compute"),
        ("link", drafting, 1e3 * seen.link_s, "C1", "verification, link"),
    ]
    for lane, start, length, color, label in spans:
        if length:
            said = f"{label}: {length:,.4g} ms"
            axes.barh(lane, length, left=start, color=color, height=0.5, label=said)
    tokens = f"{seen.tokens_per_verification:.1f} tokens, {1e3 * seen.token_s:,.4g} ms each"
    title = f"one round, predicted: {tokens}; it waits for {_BOUNDS[seen.verification_bound]}"
    axes.set(xlabel="ms", title=title)
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    axes.set_ylim(-0.6, 2.2)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f}"
