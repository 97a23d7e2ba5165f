"""A plan as tables and as a picture: where memory goes, and how one round of decoding passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from decoding.planning.forecast import Forecast
from decoding.planning.needs import Sizes
from decoding.planning.profile import Hardware
from offload.errors import TierForceError
from offload.memory_plan import MemoryPlan

Tiers = dict[str, int]  # device bytes by what they are for


def plan_picture(
    path: Path,
    title: str,
    tiers: Sequence[Tiers],
    room: float,
    host: int,
    host_room: float,
    seen: Forecast,
) -> None:
    """Left: bytes by tier as stacked bars, of a device in prefill and in decoding (`tiers`), and of
    the host (a rank's share).

    Right: seconds of one round, on the link and on the device. Raises TierForceError where it
    cannot be drawn or written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise TierForceError("--plot needs matplotlib: pip install 'tierforce[bench]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), width_ratios=(2, 3))
    bottoms = [0.0, 0.0]
    for number, name in enumerate(
        name for name, size in tiers[0].items() if size or tiers[1][name]
    ):
        heights = [phase[name] / 1e9 for phase in tiers]
        left.bar(
            ["device, prefill", "device, decode"],
            heights,
            bottom=bottoms,
            color=f"C{number}",
            label=name,
            width=0.6,
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    left.bar(["host"], [host / 1e9], color="0.6", label="KV on the host", width=0.6)
    for start, end, there in ((-0.4, 1.4, room), (1.6, 2.4, host_room)):
        left.hlines(there / 1e9, start, end, color="black", linestyle="--", linewidth=1)
        left.annotate(
            f"there is: {there / 1e9:.3g}",
            (start, there / 1e9),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
        )
    left.set(ylabel="GB of one rank", title="memory")
    left.legend(fontsize=8, frameon=False)

    drafting, unit = 1e3 * seen.drafting_s, 1e3
    spans = [
        ("device", 0.0, drafting, "C2", f"{seen.draft_length} drafted" if seen.draft_length else "")
    ]
    spans.append(("device", drafting, unit * seen.compute_s, "C0", "verification, compute"))
    spans.append(("link", drafting, unit * seen.link_s, "C1", "verification, link"))
    for lane, start, length, color, label in spans:
        if length:
            right.barh(
                lane,
                length,
                left=start,
                color=color,
                height=0.5,
                label=f"{label}: {length:,.4g} ms",
            )
    tokens = f"{seen.tokens_per_verification:.1f} tokens, {1e3 * seen.token_s:,.4g} ms each"
    right.set(
        xlabel="ms", title=f"one round, predicted: {tokens}; it waits for {seen.verification_bound}"
    )
    right.legend(fontsize=9, frameon=False, loc="upper right")
    right.set_ylim(-0.6, 2.2)
    figure.suptitle(title)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise TierForceError(f"--plot {path} cannot be written ({error}).") from error
    pyplot.close(figure)


def memory_table(
    tiers: tuple[Tiers, Tiers], placed: MemoryPlan, machine: Hardware, ranks: int
) -> Table:
    each = "each GPU" if ranks > 1 else "the GPU"
    table = Table(title=f"Fits {machine.name}: GB of {each}, by phase", title_justify="left")
    for heading in ("", "prefill", "decode"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in tiers[0]:
        table.add_row(name, *(f"{phase[name] / 1e9:.3f}" for phase in tiers))
    table.add_section()
    table.add_row("in all", *(f"{sum(phase.values()) / 1e9:.3f}" for phase in tiers))
    table.add_row("there is", *[f"{machine.device_memory / 1e9:.3f}"] * 2)
    table.add_section()
    host = f"{placed.host_bytes * ranks / 1e9:.3f}"
    table.add_row(f"host memory, of {machine.host_memory / 1e9:.0f}", host, host)
    return table


def times_table(seen: Forecast, sizes: Sizes, placed: MemoryPlan, prompt: int, new: int) -> Table:
    table = Table(title="Predicted, not measured", title_justify="left")
    for heading in ("", "", "waits for"):
        table.add_column(heading, justify="right" if table.columns else "left")
    far = sizes.target.layers - placed.resident_layers
    table.add_row("layers on the device, on the host", f"{placed.resident_layers}, {far}", "")
    if placed.late_layers:
        table.add_row("  of the first, those that come behind prefill", f"{placed.late_layers}", "")
    if sizes.has_retrieval:
        table.add_row("retrieval budget", f"{sizes.budget:,} tokens", "")
    table.add_row(
        "ring", f"{placed.slots} slots of {placed.slot_heads} heads" if far else "none", ""
    )
    table.add_row(
        f"time to first token, {prompt:,} tokens", f"{seen.prefill_s:.1f} s", seen.prefill_bound
    )
    table.add_row("plain decoding", f"{1e3 * seen.step_s:.0f} ms/token", seen.step_bound)
    if sizes.mode != "plain":
        table.add_row(f"{sizes.mode} decoding", f"{1e3 * seen.token_s:.0f} ms/token", "")
        table.add_row(
            "  a verification", f"{1e3 * seen.verification_s:.0f} ms", seen.verification_bound
        )
        table.add_row(
            f"  its {seen.draft_length} drafted tokens",
            f"{1e3 * seen.drafting_s:.0f} ms",
            "compute",
        )
        table.add_row("  tokens per verification", f"{seen.tokens_per_verification:.1f}", "")
    table.add_row(f"documents an hour, {new} new tokens each", f"{seen.documents_per_hour:.1f}", "")
    return table
