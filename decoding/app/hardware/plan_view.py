"""The plans of a request as tables and as an image: predicted times and memory by tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from decoding.app.terminal.pace import duration
from decoding.app.terminal.streams import printable
from decoding.planning.cost_model import CostModel
from decoding.planning.forecast import Forecast
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import Phases
from decoding.planning.plan import Plan, split_tokens
from decoding.planning.requirements import whole_weight_bytes
from offload.dtypes import dtype_name
from offload.errors import TierForceError
from parallel.config.parameter_count import recurrent_layers, windowed_layers

# labels of memory tiers
_TIERS = {
    "weights": "weights",
    "resident layers": "KV of on-device layers",
    "layers with a window": "KV of layers with a window",
    "recurrent states": "states of recurrent layers",
    "states of drafting levels": "the same, of drafts",
    "ring, in prefill one layer": "transfer ring",
    "device tail": "device tail (recent tokens)",
    "high_bytes": "high bytes of split KV",
    "reconstruction buffers": "reconstruction buffer",
    "splitting buffers": "split buffer",
    "retrieval cache": "retrieval cache",
    "draft cache": "draft cache",
    "rotary tables": "rotary tables",
    "hidden states": "hidden states of the prompt",
    "forward": "activations",
}
_BOUNDS = {
    "link": "host link",
    "compute": "compute",
    "arithmetic": "compute",
    "all-reduce": "all-reduce",
    "write-back": "host link",
}


@dataclass(frozen=True)
class Plans:
    """The plans of one request, and the cost model that forecasts them."""

    costs: CostModel
    best: Plan
    others: Sequence[Plan]  # with other modes
    shared: Plan  # as one of several concurrent requests
    first: Plan  # as the first request of a run

    @property
    def forecast(self) -> Forecast:
        """Return the forecast of the best plan."""
        return self.costs.forecast(self.best)

    @property
    def memory_phases(self) -> Phases:
        """Return a rank's device memory by tier, weights included, in prefill and in decoding."""
        weights = {"weights": self.best.requirements.weight_bytes}
        prefill, decode = self.best.breakdown
        return weights | prefill, weights | decode


def times_table(plans: Plans) -> Table:
    """Return the predicted times of a request, compared with other modes in plans of their own."""
    best, costs, forecast = plans.best, plans.costs, plans.forecast
    mode = best.requirements.mode
    title = f"Fits {escape(printable(costs.hardware.name))}. Predicted, not measured:"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("bound by")
    table.add_row(f"document of {best.spec.prompt:,} tokens", duration(forecast.document_s))
    table.add_row("  prefill", duration(forecast.prefill_s), _BOUNDS[forecast.prefill_bound])
    table.add_row(
        f"  decoding {best.spec.max_new_tokens:,} tokens",
        duration(forecast.decode_s),
        _BOUNDS[forecast.verification_bound],
    )
    if plans.first.requirements.strategy != best.requirements.strategy:
        first_s = costs.forecast(plans.first).document_s
        table.add_row("first document of a run", duration(first_s))
    concurrency = plans.shared.concurrency
    suffix = f", {concurrency} concurrent" if concurrency > 1 else ""
    per_hour = float(f"{costs.forecast(plans.shared).documents_per_hour:.3g}")
    table.add_row(f"documents per hour{suffix}", f"{per_hour:,.10g}")
    table.add_row(f"decoding, {mode}", _per_token(forecast))
    if mode != "plain":
        times = {each.requirements.mode: _per_token(costs.forecast(each)) for each in plans.others}
        for name, time in {"plain": "does not fit", **times}.items():
            table.add_row(f"decoding, {name}", time)
        table.add_row("draft tokens per round", f"{forecast.num_draft_tokens}")
        table.add_row("generated tokens per round", f"{forecast.tokens_per_verification:.1f}")
    if best.retrieval_layers:
        budget = best.requirements.strategy.budget
        table.add_row("retrieval budget", f"{budget:,} tokens per head")
    target = best.requirements.target
    if windowed := windowed_layers(target):
        table.add_row("layers with a window", f"{windowed}")
    if recurrent := recurrent_layers(target):
        table.add_row("layers with a recurrent state", f"{recurrent}")
    if best.requirements.copies or best.layers_on_host:  # else there is one memory
        table.add_row("on-device layers", f"{best.memory.resident_layers}")
        table.add_row("offloaded layers", f"{best.layers_on_host}")
    if split := best.memory.split_layers:
        table.add_row("  with high bytes on the GPU", f"{split}")
        if budget := split_tokens(best):
            table.add_row("  and the exact keys of", f"{budget:,} tokens")
    return table


def memory_table(plans: Plans) -> Table:
    """Return the memory by tier in GB, during prefill and during decoding."""
    machine, ranks = plans.costs.hardware, plans.best.requirements.ranks
    memory, unit = ("GPU memory", "GPU") if machine.runs_ahead else ("Memory", "rank")
    title = f"{memory} in GB, per {unit}:" if ranks > 1 else f"{memory} in GB:"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("")
    table.add_column("prefill", justify="right")
    table.add_column("decoding", justify="right")
    phases, needs = plans.memory_phases, plans.best.requirements
    labels = dict(_TIERS)
    if not machine.runs_ahead:
        labels["resident layers"] = "KV of layers with full attention"
    if needs.target.kept_types:
        whole = _gb(whole_weight_bytes(needs))
        labels["weights"] = f"weights, packed ({whole} in {dtype_name(needs.dtype)})"
    for name in phases[0]:
        if any(phase[name] for phase in phases):
            table.add_row(labels.get(name, name), *(_gb(phase[name]) for phase in phases))
    table.add_section()
    table.add_row(
        f"total, of {_gb(machine.device_memory)}", *(_gb(sum(phase.values())) for phase in phases)
    )
    host = _gb(plans.best.memory.host_bytes * ranks)
    if machine.runs_ahead:
        table.add_row(f"host memory, of {_gb(machine.host_memory)}", host, host)
    elif plans.best.layers_on_host:
        table.add_row("KV of offloaded layers", host, host)
    return table


def plan_picture(path: Path, model: str, plans: Plans) -> None:
    """Draw memory by tier, and one decoding round on the link and on the device.

    Raises TierForceError if the image cannot be drawn or written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise TierForceError("--plot needs matplotlib: pip install 'tierforce[bench]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), width_ratios=(2, 3))
    _draw_memory(left, plans)
    _draw_round(right, plans.forecast, _device(plans.costs.hardware))
    spec, machine = plans.best.spec, plans.costs.hardware
    figure.suptitle(
        f"{model}, {spec.prompt:,} + {spec.max_new_tokens} tokens on {machine.name}, "
        f"{spec.requirements.mode}"
    )
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise TierForceError(f"--plot {path} cannot be written ({error}).") from error
    pyplot.close(figure)


def _draw_memory(axes: Any, plans: Plans) -> None:
    """Draw bars of a GPU's memory in both phases, and of a rank's share of host memory."""
    phases = plans.memory_phases
    device = _device(plans.costs.hardware)
    bottoms = [0.0, 0.0]
    shown = [name for name in phases[0] if any(phase[name] for phase in phases)]
    for number, name in enumerate(shown):
        heights = [phase[name] / 1e9 for phase in phases]
        axes.bar(
            [f"{device}, prefill", f"{device}, decoding"],
            heights,
            bottom=bottoms,
            color=f"C{number}",
            label=_TIERS.get(name, name),
            width=0.6,
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    machine, host = plans.costs.hardware, plans.best.memory.host_bytes / 1e9
    axes.bar(["host"], [host], color="0.6", label="offloaded KV", width=0.6)
    _draw_limit(axes, (-0.4, 1.4), machine.device_memory)
    _draw_limit(axes, (1.6, 2.4), machine.host_memory / plans.best.requirements.ranks)
    axes.set(ylabel="GB per rank", title="memory")
    axes.legend(fontsize=8, frameon=False)


def _draw_limit(axes: Any, span: tuple[float, float], nbytes: float) -> None:
    """Draw the available memory as a line."""
    height = nbytes / 1e9
    axes.hlines(height, *span, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"available: {height:.3g}",
        (span[0], height),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )


def _device(machine: HardwareProfile) -> str:
    return "GPU" if machine.runs_ahead else "CPU"


def _draw_round(axes: Any, forecast: Forecast, device: str) -> None:
    """Draw the milliseconds of one decoding round, on the link and on the device."""
    drafting = 1e3 * forecast.drafting_s
    spans = [
        (device, 0.0, drafting, "C2", f"drafting {forecast.num_draft_tokens} tokens"),
        (device, drafting, 1e3 * forecast.compute_s, "C0", "verification, compute"),
        ("link", drafting, 1e3 * forecast.link_s, "C1", "verification, transfer"),
    ]
    for lane, start, length, color, label in spans:
        if length:
            legend = f"{label}: {length:,.4g} ms"
            axes.barh(lane, length, left=start, color=color, height=0.5, label=legend)
    title = (
        f"predicted round: {forecast.tokens_per_verification:.1f} tokens, "
        f"{1e3 * forecast.token_s:,.4g} ms/token, bound by {_BOUNDS[forecast.verification_bound]}"
    )
    axes.set(xlabel="ms", title=title)
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    axes.set_ylim(-0.6, 2.2)


def _per_token(forecast: Forecast) -> str:
    return f"{1e3 * forecast.token_s:,.0f} ms/token"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f}"
