"""What one pass costs, by context: a plain step, a verification, a refresh, a pass over the
retrieval cache, one of the draft.

The physics: a step and a verification read the whole KV, so they grow with the context; a
verification's further rows cost arithmetic only. Passes of the lower levels run on caches of fixed
size and must not grow. One rank and no link.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench.harness.options import Draft, Dtype, Output, Target, Text, Threads
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, text_tokens
from decoding import Engine, Settings
from decoding.session import Session
from offload.cache import Cache
from offload.fixed_shape import SlotCache
from parallel.graphs import GraphRunner
from parallel.lockstep import PassRunner
from parallel.model import Llama

DRAFTED = 64  # tokens of text behind the prompt that there is room for


def pass_seconds(
    model: Llama, cache: Cache, tokens: torch.Tensor, run: PassRunner = Llama.__call__
) -> float:
    """One pass over these tokens, until its logits are there; the cache stays where it is."""
    started = time.perf_counter()
    run(model, tokens, cache, len(tokens))[-1, 0].item()
    return time.perf_counter() - started


def pass_ms(
    model: Llama, cache: Cache, tokens: torch.Tensor, repeats: int, run: PassRunner = Llama.__call__
) -> float:
    """Median milliseconds of such passes."""
    pass_seconds(model, cache, tokens, run)  # warms up
    return 1e3 * statistics.median(pass_seconds(model, cache, tokens, run) for _ in range(repeats))


def passes(session: Session, repeats: int) -> dict[str, float]:
    """Milliseconds by level and rows of a pass."""
    target, model, tokens = session.target, session.runtime.target, session.prompt
    followers, target.followers = target.followers, []
    found = {
        f"target {rows}": pass_ms(model, target, tokens[:rows], repeats) for rows in (1, 17, 33)
    }
    target.followers = followers
    if session.retrieval is not None:
        session.retrieval.min_interval = 0  # the text stands still, and is chosen from all the same
        found["33 and refresh"] = pass_ms(model, target, tokens[:33], repeats)
        for rows in (1, 2):
            found |= short_passes(
                session.forward,
                f"retrieval {rows}",
                model,
                session.retrieval,
                tokens[:rows],
                5 * repeats,
            )
    if session.draft is not None and session.runtime.draft is not None:
        found |= short_passes(
            session.forward,
            "draft 1",
            session.runtime.draft,
            session.draft,
            tokens[:1],
            5 * repeats,
        )
    return found


def short_passes(
    run: GraphRunner, name: str, model: Llama, cache: SlotCache, tokens: torch.Tensor, repeats: int
) -> dict[str, float]:
    """As a session makes them, and where these are recorded, as they would be otherwise."""
    run.warm(model, tokens, cache, len(tokens))
    found = {name: pass_ms(model, cache, tokens, repeats, run)}
    if run.enabled:
        found[f"{name}, not recorded"] = pass_ms(model, cache, tokens, repeats)
    return found


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    contexts: Annotated[str, typer.Option(help="Prompt tokens.")] = "8192,16384,32768,65536",
    budget: Annotated[int, typer.Option(help="Retrieval budget, tokens a head.")] = 4096,
    dtype: Dtype = "bfloat16",
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Passes of each kind; the median counts.")] = 9,
    output: Output = Path("results/passes.json"),
) -> None:
    """Read prompts of growing length, and time every kind of pass behind each."""
    prepare(threads)
    engine, peak = (
        Engine.from_pretrained(
            model, draft, Settings(mode="hierarchical", dtype=dtype, budget=budget)
        ),
        0,
    )
    tokens, progress, table = text_tokens(engine.tokenizer, text), Console(stderr=True), []
    for context in map(int, contexts.split(",")):
        if context > len(tokens):
            raise typer.BadParameter(
                f"the text has {len(tokens)} tokens, fewer than {context}", param_hint="--contexts"
            )
        started = time.perf_counter()
        session = Session(engine.runtime, tokens[:context], DRAFTED)
        session.prefill()
        row: dict[str, Any] = {"tokens": context, "prefill s": time.perf_counter() - started}
        row |= passes(session, repeats)
        session.close()
        peak = max(peak, *(each or 0 for each in session.peaks.values()))
        progress.print(" ".join(f"{name}: {value:,.1f}" for name, value in row.items()))
        table.append(row)
    first, last = table[0], table[-1]
    show(
        f"Milliseconds a pass, by level and rows: {dtype}, budget {budget}, "
        f"{torch.get_num_threads()} threads",
        table,
    )
    grown = {
        name: last[name] / first[name] for name in first if name not in ("tokens", "prefill s")
    }
    print(f"from {first['tokens']:,} to {last['tokens']:,} tokens, times as long:")
    for name, ratio in grown.items():
        print(f"  {name}: {ratio:.2f}")
    steps = {row["tokens"]: row["target 17"] / row["target 1"] for row in table}
    for context, ratio in steps.items():
        print(f"{context:,} tokens: a pass of 17 rows takes {ratio:.2f} times as long as one of 1")
    print(f"peak memory of the process: {peak / 1e9:.1f} GB")
    save(
        output,
        {
            "settings": {"dtype": dtype, "budget": budget},
            "rows": table,
            "grown": grown,
            "steps": steps,
            "peak_rss_bytes": peak,
        },
    )
