"""What a refresh costs: verifications that choose the retrieval cache anew, and such that do not.

The physics: choosing reads the prefix's keys for the scores of some rows, and keys and values once
more for the summaries: about two passes over memory that has just been read. On a GPU that is a few
percent of the time the link takes to bring it; on a CPU without a link it is dear, and that is
measured here. A cache that was chosen once and takes over the new rows is the base.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.drafts.overlap import COMPUTE, OURS, STATIC, PolicyTrace, Variant
from bench.harness.options import Budget, Context, Output, Repeats, Target, Text, Threads, integers
from bench.harness.record import benchmark, prepare, publish
from bench.harness.text import DEMO, prompt_tokens
from bench.speed.passes import pass_ms
from decoding import Engine, Settings


@dataclass(frozen=True)
class Row:
    """Verifications of so many rows with one kind of retrieval cache."""

    dtype: str
    rows: int
    retrieval_cache: str
    verification_ms: float
    min_verification_ms: float
    refresh_ms: float  # over the base, which chooses nothing
    refresh_share: float  # of the base
    selections: int  # so far


def time_refreshes(trace: PolicyTrace, dtype: str, rows: int, repeats: int) -> list[Row]:
    """Time verifications of so many rows with each of the trace's caches; the first is the base."""
    session = trace.session
    times: dict[Variant, list[float]] = {variant: [] for variant in trace.caches}
    for _ in range(repeats + 1):
        for variant, cache in trace.caches.items():
            cache.min_interval = 0  # the text stands still, and is chosen from all the same
            session.target.followers = [cache]
            ms = pass_ms(session.runtime.target, session.target, session.prompt[:rows])
            times[variant].append(ms)
    medians = {variant: _median(each) for variant, each in times.items()}
    base = next(iter(medians.values()))
    return [
        Row(
            dtype,
            rows,
            variant.name,
            ms,
            min(times[variant]),
            ms - base,
            (ms - base) / base,
            trace.caches[variant].selections,
        )
        for variant, ms in medians.items()
    ]


def _median(times: Sequence[float]) -> float:
    return statistics.median(times[1:])  # the first one warms up


@benchmark
def main(
    model: Target = DEMO / "target",
    text: Text = None,
    context: Context = 32_768,
    rows: Annotated[str, typer.Option(help="Tokens per verification pass.")] = "17,33",
    dtypes: Annotated[str, typer.Option(help="Of bfloat16 and float32.")] = "bfloat16,float32",
    budget: Budget = 4096,
    threads: Threads = 0,
    repeats: Repeats = 15,
    output: Output = Path("results/refresh.json"),
) -> None:
    """Time verification passes with and without a refresh."""
    prepare(threads)
    kinds = (STATIC, replace(OURS, summary=0), OURS, COMPUTE)
    variants = [replace(each, budget=budget) for each in kinds]
    table: list[Row] = []
    for dtype in dtypes.split(","):
        engine = Engine.from_pretrained(model, settings=Settings(mode="retrieval", dtype=dtype))
        prompt = prompt_tokens(engine.tokenizer, context, text)
        trace = PolicyTrace(engine.runtime, prompt, 64, variants, 64)
        for count in integers(rows):
            table += time_refreshes(trace, dtype, count, repeats)
    threads = torch.get_num_threads()
    title = f"Verification behind {context:,} tokens, budget {budget}, {threads} threads"
    publish(output, title, table)
