"""Whether the ring overlaps: a verification against the larger of its link and compute times.

The physics: a verification has to move the flushed KV of every host layer (bytes / rate) and to
compute over it (what the same pass takes when host memory is device memory). With perfect overlap
the wall time is the larger of the two. What is lost is the first chunk, which nothing hides, and
the compute on the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.harness.options import (
    NATIVE,
    SMOLLM2,
    Context,
    Dtype,
    Output,
    Rates,
    Repeats,
    Rope,
    Target,
    Text,
    Threads,
    decimals,
)
from bench.harness.record import benchmark, prepare, publish
from bench.harness.text import prompt_tokens
from bench.speed.passes import median_ms
from decoding import Engine, Settings
from decoding.session import Session


@dataclass(frozen=True)
class Row:
    """Verifications over one link."""

    link_gbps: float
    mb_per_verification: float
    link_ms: float
    compute_ms: float
    wall_ms: float
    wall_over_bound: float  # the bound is the larger of link and compute


@benchmark
def main(
    target: Target = SMOLLM2,
    rope: Rope = None,
    text: Text = None,
    context: Context = NATIVE,
    rates: Rates = "0.25,0.5,1,2,4",
    rows: Annotated[int, typer.Option(help="Tokens per verification pass.")] = 17,
    dtype: Dtype = "bfloat16",
    threads: Threads = 0,
    repeats: Repeats = 5,
    output: Output = Path("results/transfer.json"),
) -> None:
    """Time verification passes over emulated links and report wall / max(link, compute)."""
    prepare(threads)
    base = Settings(mode="plain", rope=rope, dtype=dtype, link="view", resident_layers=0)
    engine = Engine.from_pretrained(target, settings=base)
    prompt = prompt_tokens(engine.tokenizer, context, text)
    resident = Session(engine.runtime, prompt, rows + 1)
    resident.prefill()
    tokens, table = resident.prompt[:rows], list[Row]()
    for rate in decimals(rates):
        runtime = engine.runtime.with_settings(replace(base, link=f"emulated:{rate}"))
        session = Session(runtime, prompt, rows + 1)
        session.prefill()
        before = session.target.traffic.link_in
        compute_ms = median_ms(runtime.target, resident.target, tokens, repeats)
        wall_ms = median_ms(runtime.target, session.target, tokens, repeats)
        moved = (session.target.traffic.link_in - before) // (repeats + 1)
        link_ms = moved / rate / 1e6
        bound = max(link_ms, compute_ms)
        table.append(Row(rate, moved / 1e6, link_ms, compute_ms, wall_ms, wall_ms / bound))
        runtime.link.close()
    threads = torch.get_num_threads()
    title = f"Verifying {rows} tokens behind {context:,}, no layer resident, {threads} threads"
    publish(output, title, table)
