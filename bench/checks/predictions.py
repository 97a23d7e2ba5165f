"""Times predicted as by `tierforce plan`, compared with times measured on this machine.

Hardware rates are measured beforehand, on kernels and copies alone (`decoding.probe.kernels`), not
on the predicted runs. Acceptance does not depend on hardware: each prediction uses the measured
acceptance rate of its run, so that only times are tested.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.harness import options as opt
from bench.harness.decode_loop import decode_loop
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompt_tokens
from decoding import Engine, Sampling, Settings
from decoding.engine.session import SequenceState
from decoding.planning.cost_model import CostModel
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.round_cost import Acceptance
from decoding.probe.kernels import kernel_rates
from decoding.speculation.decoders import Decoder, Speculative
from decoding.speculation.draft_length import draft_lengths, expected_tokens
from offload.memory.bandwidth import BandwidthProbe

SAMPLING = Sampling(0.6, top_p=0.9, seed=1)


@dataclass(frozen=True)
class Setting:
    """The settings of one run."""

    part: float  # share of the longest context
    mode: str  # auto: hierarchical with a draft model, else retrieval
    rate: float = 0.0  # GB/s of the link; 0: no link
    resident: float = 0.0  # share of the layers
    budget: int = 1024
    draft: int = 8
    inner: int = 2

    def settings(self, base: Settings, layers: int) -> Settings:
        return replace(
            base,
            mode=self.mode,
            link=f"emulated:{self.rate}" if self.rate else "view",
            gpu_kv_layers=int(self.resident * layers) if self.rate else None,
            retrieval_budget=self.budget,
            num_draft_tokens=self.draft,
            num_inner_draft_tokens=self.inner,
        )


SETTINGS = [
    Setting(0.25, "plain"),
    Setting(1.0, "plain"),
    Setting(0.5, "plain", 1.0),
    Setting(0.5, "plain", 0.5, resident=0.5),
    Setting(0.25, "auto", 0.5, draft=16),
    Setting(0.5, "auto", 0.5, draft=16),
    Setting(0.5, "auto", 0.25, resident=0.3, draft=24, budget=2048),
    Setting(0.5, "auto", 1.0, draft=8, inner=3),
    Setting(1.0, "auto", 0.5, draft=32, budget=4096),
    Setting(1.0, "auto", 1.0, resident=0.5, draft=12, budget=2048),
    Setting(0.5, "auto", draft=4),
    Setting(1.0, "auto", draft=6, budget=2048),
    Setting(0.5, "retrieval", 0.5, draft=12, budget=2048),
]
ALL = len(SETTINGS)


def measured_profile(engine: Engine) -> HardwareProfile:
    """Return the profile of this machine for a model; the link rates depend on the setting."""
    device, config = engine.group.device, engine.runtime.target.config
    rates: dict[str, Any] = kernel_rates(config, device, engine.runtime.dtype)
    return HardwareProfile(
        "here",
        gpus=1,
        device_memory=1e12,
        host_memory=1e12,
        link_in=1e12,
        link_out=1e12,
        all_reduce_s=0.0,
        all_reduce_rate=1e15,
        runs_ahead=device.type == "cuda",
        **rates,
    )


def acceptance_of(tokens: float, length: int) -> float:
    """Return the acceptance rate at which drafts of `length` yield `tokens` tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, length) < tokens else (low, middle)
    return low


def compare(setting: Setting, session: SequenceState, machine: HardwareProfile) -> Row:
    """Return the row of a setting: measured, and predicted with the measured acceptance."""
    plan, needs = session.plan, session.plan.requirements
    started = time.perf_counter()
    first = int(session.prefill().argmax())
    first_s = time.perf_counter() - started
    lengths = draft_lengths(needs.settings, needs.mode)
    decoder, seconds = decode_loop(session, first, SAMPLING, lengths)
    token_s = seconds / decoder.stats.produced
    outer, inner = acceptance_rates(setting, decoder)
    acceptance = Acceptance(outer, inner, needs.strategy.budget)
    predicted = CostModel(machine, acceptance).forecast(plan)
    return {
        "context": plan.spec.prompt,
        "mode": needs.mode,
        "link_gbps": setting.rate or None,
        "gpu_kv_layers": plan.memory.resident_layers,
        "retrieval_budget": setting.budget,
        "num_draft_tokens": setting.draft,
        "num_inner_draft_tokens": setting.inner,
        "acceptance": outer if needs.mode != "plain" else None,
        "first_s": first_s,
        "predicted_first_s": predicted.prefill_s,
        "first_error": predicted.prefill_s / first_s - 1,  # relative to the measured time
        "ms_per_token": 1e3 * token_s,
        "predicted_ms_per_token": 1e3 * predicted.token_s,
        "ms_per_token_error": predicted.token_s / token_s - 1,
        "bound": predicted.verification_bound,
    }


def acceptance_rates(setting: Setting, decoder: Decoder) -> tuple[float, float]:
    """Return the measured rates of outer and inner drafts; 1 for a missing level."""
    levels = [level for level in decoder.levels() if isinstance(level, Speculative)]
    rates = [
        acceptance_of(level.stats.tokens_per_forward or 1.0, length)
        for level, length in zip(levels, (setting.draft, setting.inner), strict=False)
    ]
    outer, inner = [*rates, 1.0, 1.0][:2]
    return outer, inner


@benchmark("Predicted and measured, {dtype}, deterministic {deterministic}, {threads} threads")
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    text: opt.Text = None,
    context: opt.Longest = opt.NATIVE,
    new_tokens: opt.NewTokens = 96,
    plain_tokens: Annotated[
        int, typer.Option(help="Tokens per run of plain decoding over a link, which is slow.")
    ] = 12,
    dtype: opt.Dtype = "bfloat16",
    threads: opt.Threads = 0,
    settings: opt.First = ALL,
    deterministic: Annotated[
        bool, typer.Option(help="Predict and run deterministic decoding.")
    ] = False,
    output: opt.Output = Path("results/predictions.json"),
) -> Measurement:
    """Predict and measure time to first token and ms/token of every setting."""
    defaults = Settings(rope=rope, dtype=dtype, deterministic=deterministic)
    engine = Engine.from_pretrained(target, draft, defaults)
    base, layers = engine.runtime.settings, engine.runtime.target.config.full_layers
    tokens = prompt_tokens(engine.tokenizer, context, text)
    machine, rows = measured_profile(engine), list[Row]()
    # compiles kernels, once per process
    SequenceState(engine.runtime, tokens[: context // 4], 1).prefill()
    for setting in SETTINGS[:settings]:
        count = plain_tokens if setting.mode == "plain" and setting.rate else new_tokens
        runtime = engine.runtime.with_settings(setting.settings(base, layers))
        if setting.rate:
            with closing(BandwidthProbe(runtime.link, 4 << 20)) as probe:
                link_in, link_out = probe.rate(out=False), probe.rate(out=True)
            machine = replace(machine, link_in=link_in, link_out=link_out)
        prompt = tokens[: int(setting.part * context)]
        rows.append(compare(setting, SequenceState(runtime, prompt, count + 1), machine))
        runtime.link.close()
        predicted, measured = rows[-1]["predicted_ms_per_token"], rows[-1]["ms_per_token"]
        say(f"{setting}: predicted {predicted:.1f} ms/token, measured {measured:.1f}")
        yield {"rows": rows, "errors": _errors(rows), "hardware": vars(machine)}


def _errors(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median and the maximum of the absolute relative errors."""
    errors: dict[str, float] = {}
    for name in ("first_error", "ms_per_token_error"):
        sizes = [abs(row[name]) for row in rows]
        errors |= {f"{name}, median": statistics.median(sizes), f"{name}, worst": max(sizes)}
    return errors
