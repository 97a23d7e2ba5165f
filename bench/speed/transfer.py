"""Does the ring overlap? Verification's wall time against the larger of its link time and its
compute time.

The physics: a verification has to move the flushed KV of every host layer (bytes / rate) and to
compute over it (what the same pass takes when host memory is device memory). With perfect overlap
the wall time is the larger of the two. What is lost is the first chunk, which nothing hides, and
the compute on the last.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.harness.options import Context, Output, Rates, Target, Text, Threads
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from bench.speed.passes import pass_ms
from decoding import Engine, Settings
from decoding.session import Session


@benchmark
def main(
    model: Target = DEMO / "target",
    text: Text = None,
    context: Context = 32_768,
    rates: Rates = "0.25,0.5,1,2,4",
    rows: Annotated[int, typer.Option(help="Tokens per verification pass.")] = 17,
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Passes per rate.")] = 5,
    output: Output = Path("results/transfer.json"),
) -> None:
    """Time verification passes over emulated links and report wall / max(link, compute)."""
    prepare(threads)
    base = Settings(mode="plain", link="view", resident_layers=0)
    engine = Engine.from_pretrained(model, settings=base)
    prompt = prompt_tokens(engine.tokenizer, context, text)
    view = Session(engine.runtime, prompt, rows + 1)
    view.prefill()
    table = []
    for rate in map(float, rates.split(",")):
        models = engine.runtime.with_settings(replace(base, link=f"emulated:{rate}"))
        session = Session(models, prompt, rows + 1)
        session.prefill()
        before = session.target.traffic.link_in
        compute = pass_ms(models.target, view.target, view.prompt[:rows], repeats) / 1e3
        wall = pass_ms(models.target, session.target, session.prompt[:rows], repeats) / 1e3
        moved = (session.target.traffic.link_in - before) // (repeats + 1)
        link = moved / (rate * 1e9)
        table.append(
            {
                "link GB/s": rate,
                "MB per verification": moved / 1e6,
                "link ms": 1e3 * link,
                "compute ms": 1e3 * compute,
                "wall ms": 1e3 * wall,
                "wall / max(link, compute)": wall / max(link, compute),
            }
        )
        models.link.close()
    show(
        f"Verification of {rows} tokens behind {context:,}, no layer resident, "
        f"{torch.get_num_threads()} threads",
        table,
    )
    save(output, {"settings": {"context": context, "rows": rows}, "rows": table})
