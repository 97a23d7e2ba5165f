"""Predictions held against this machine: what `tierforce plan` would have said, and what it took.

Rates are measured first, on kernels and copies alone (`decoding.probe.kernels`), and no run that is
predicted is looked at for them. Acceptance is no matter of hardware: a prediction is given the rate
that its run then showed, so what is tested is time.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench.harness.decode_loop import continued
from bench.harness.options import Draft, Dtype, Output, Target, Text, Threads
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from decoding import Engine, Sampling, Settings
from decoding.planning.cost import Acceptance
from decoding.planning.forecast import Forecast, forecast
from decoding.planning.profile import HardwareProfile
from decoding.probe.kernels import pass_rates
from decoding.session import Session, draft_lengths
from decoding.speculation.decoders import Decoder, Speculative
from decoding.speculation.draft_length import expected_tokens
from offload.bandwidth import Copies

SAMPLING = Sampling(0.6, top_p=0.9, seed=1)


@dataclass(frozen=True)
class Setting:
    """One run. Tokens, and GB/s: no link where the rate is 0."""

    context: int
    mode: str
    rate: float = 0.0
    resident: int = 0
    budget: int = 1024
    draft: int = 8
    inner: int = 2

    def settings(self, dtype: str) -> Settings:
        link = f"emulated:{self.rate}" if self.rate else "view"
        layers = self.resident if self.rate else None
        base = Settings(
            mode=self.mode, dtype=dtype, link=link, resident_layers=layers, budget=self.budget
        )
        return replace(base, draft_length=self.draft, inner_length=self.inner)


SETTINGS = [
    Setting(8192, "plain"),
    Setting(32_768, "plain"),
    Setting(16_384, "plain", 1.0),
    Setting(16_384, "plain", 0.5, resident=3),
    Setting(8192, "hierarchical", 0.5, draft=16),
    Setting(16_384, "hierarchical", 0.5, draft=16),
    Setting(16_384, "hierarchical", 0.25, resident=2, draft=24, budget=2048),
    Setting(16_384, "hierarchical", 1.0, draft=8, inner=3),
    Setting(32_768, "hierarchical", 0.5, draft=32, budget=4096),
    Setting(32_768, "hierarchical", 1.0, resident=3, draft=12, budget=2048),
    Setting(16_384, "hierarchical", draft=4),
    Setting(32_768, "hierarchical", draft=6, budget=4096),
    Setting(16_384, "retrieval", 0.5, draft=12, budget=2048),
]


def here(engine: Engine) -> HardwareProfile:
    """This machine, as a probe for this model would describe it; the link is each setting's own."""
    device, config = engine.group.device, engine.runtime.target.config
    rates: dict[str, Any] = pass_rates(config, device, engine.runtime.dtype)
    rates |= {
        "gpus": 1,
        "device_memory": 1e12,
        "host_memory": 1e12,
        "link_in": 1e12,
        "link_out": 1e12,
    }
    return HardwareProfile(
        "here", all_reduce_s=0.0, all_reduce_rate=1e15, runs_ahead=device.type == "cuda", **rates
    )


def acceptance_of(tokens: float, length: int) -> float:
    """The acceptance rate with which drafts of `length` yield so many tokens a verification."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, length) < tokens else (low, middle)
    return low


def measured(session: Session, new: int) -> tuple[float, float, Decoder]:
    """Seconds to the first token, seconds a further token, and what decoded."""
    started = time.perf_counter()
    first = int(session.prefill().argmax())
    first_s = time.perf_counter() - started
    decoder, seconds = continued(session, first, SAMPLING, draft_lengths(session.runtime.settings))
    return first_s, seconds / decoder.stats.produced, decoder


def predicted(
    setting: Setting, session: Session, machine: HardwareProfile, decoder: Decoder
) -> tuple[Forecast, float]:
    """And the acceptance rate it was given."""
    rates = [1.0, 1.0]
    levels = [level for level in decoder.levels() if isinstance(level, Speculative)]
    for index, (level, length) in enumerate(
        zip(levels, (setting.draft, setting.inner), strict=False)
    ):
        rates[index] = acceptance_of(level.stats.tokens_per_pass or 1.0, length)
    needs, prompt = session.runtime.needs, len(session.prompt)
    acceptance = Acceptance(rates[0], rates[1], needs.budget)
    return forecast(needs, session.plan, machine, prompt, session.new, acceptance), rates[0]


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens per run.")] = 96,
    plain_tokens: Annotated[
        int, typer.Option(help="Tokens per run of plain decoding over a link, which is slow.")
    ] = 12,
    dtype: Dtype = "bfloat16",
    threads: Threads = 0,
    output: Output = Path("results/model.json"),
) -> None:
    """Predict every setting's time to first token and ms/token, run it, and compare."""
    prepare(threads)
    engine = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    machine, progress, table = here(engine), Console(stderr=True), []
    # makes kernels, once a process
    Session(engine.runtime, prompt_tokens(engine.tokenizer, SETTINGS[0].context, text), 1).prefill()
    for setting in SETTINGS:
        new = plain_tokens if setting.mode == "plain" and setting.rate else new_tokens
        models = engine.runtime.with_settings(setting.settings(dtype))
        if setting.rate:
            with closing(Copies(models.link, 4 << 20)) as copies:
                machine = replace(
                    machine, link_in=copies.rate(out=False), link_out=copies.rate(out=True)
                )
        session = Session(models, prompt_tokens(engine.tokenizer, setting.context, text), new + 1)
        first_s, token_s, decoder = measured(session, new)
        seen, acceptance = predicted(setting, session, machine, decoder)
        row: dict[str, Any] = {
            "context": setting.context,
            "mode": setting.mode,
            "link GB/s": setting.rate or None,
        }
        row |= {
            "resident": session.plan.resident_layers,
            "budget": setting.budget,
            "draft": setting.draft,
            "inner": setting.inner,
        }
        row |= {"acceptance": acceptance if setting.mode != "plain" else None}
        row |= {"first s": first_s, "said": seen.prefill_s, "off": seen.prefill_s / first_s - 1}
        row |= {
            "ms/token": 1e3 * token_s,
            "told": 1e3 * seen.token_s,
            "out": seen.token_s / token_s - 1,
        }
        row |= {"bound": seen.verification_bound}
        progress.print(" ".join(f"{name}: {value}" for name, value in row.items()))
        table.append(row)
        models.link.close()
    show(f"Predicted (said, told) and measured, {dtype}, {torch.get_num_threads()} threads", table)
    errors = {
        "time to first token": [abs(row["off"]) for row in table],
        "ms/token": [abs(row["out"]) for row in table],
    }
    for name, found in errors.items():
        print(f"{name}: median error {statistics.median(found):.1%}, worst {max(found):.1%}")
    summary = {
        name: {"median": statistics.median(found), "worst": max(found)}
        for name, found in errors.items()
    }
    save(output, {"hardware": vars(machine), "rows": table, "errors": summary})
