"""What a refresh costs: verification passes with a retrieval cache that is chosen anew in each, and
the same passes without.

The physics: choosing reads the prefix's keys for the scores of some rows, and keys and values once
more for the summaries: about two passes over memory that has just been read. On a GPU that is a few
percent of the time the link takes to bring it; on a CPU without a link it is dear, and that is
measured here. A cache that was chosen once and takes over the new rows is the base.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.drafts.overlap import COMPUTE, OURS, STATIC, Led, Variant
from bench.harness.options import Context, Output, Target, Text, Threads
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from bench.speed.passes import pass_seconds
from decoding import Engine, Settings


@benchmark
def main(
    model: Target = DEMO / "target",
    text: Text = None,
    context: Context = 32_768,
    rows: Annotated[str, typer.Option(help="Tokens per verification pass.")] = "17,33",
    dtypes: Annotated[str, typer.Option(help="Of bfloat16 and float32.")] = "bfloat16,float32",
    budget: Annotated[int, typer.Option(help="Retrieval budget, tokens a head.")] = 4096,
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Passes of each kind, interleaved.")] = 15,
    output: Output = Path("results/refresh.json"),
) -> None:
    """Time verification passes with and without a refresh."""
    prepare(threads)
    table = []
    for dtype in dtypes.split(","):
        engine = Engine.from_pretrained(model, settings=Settings(mode="retrieval", dtype=dtype))
        variants = [
            replace(each, budget=budget)
            for each in (STATIC, replace(OURS, summary=0), OURS, COMPUTE)
        ]
        led = Led(engine.runtime, prompt_tokens(engine.tokenizer, context, text), 64, variants, 64)
        for count in map(int, rows.split(",")):
            times: dict[Variant, list[float]] = {variant: [] for variant in led.caches}
            for _, (variant, cache) in product(range(repeats + 1), led.caches.items()):
                cache.min_interval = 0  # the text stands still, and is chosen from all the same
                led.session.target.followers = [cache]
                session = led.session
                times[variant].append(
                    1e3
                    * pass_seconds(engine.runtime.target, session.target, session.prompt[:count])
                )
            base_ms = statistics.median(times[variants[0]][1:])
            for variant, found in times.items():
                ms = statistics.median(found[1:])  # the first one warms up
                row = {
                    "dtype": dtype,
                    "rows": count,
                    "retrieval cache": variant.name,
                    "verification ms": ms,
                    "least": min(found),
                }
                row |= {
                    "refresh ms": ms - base_ms,
                    "share of the verification": (ms - base_ms) / base_ms,
                }
                table.append({**row, "choices so far": led.caches[variant].selections})
    show(
        f"Verification behind {context:,} tokens, budget {budget}, {torch.get_num_threads()} "
        "threads",
        table,
    )
    save(
        output,
        {"settings": {"context": context, "budget": budget, "repeats": repeats}, "rows": table},
    )
