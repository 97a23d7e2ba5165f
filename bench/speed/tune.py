"""The engine's own choice of budget, layers and draft length, against the best of a grid.

The physics: over a link every layer that is resident saves its share of a verification; every token
of retrieval budget makes verifications rarer, and drafting dearer. Which is worth more depends on
the link, and on how often proposals stand. Here both share too little memory.

The engine reads some texts first, to learn, and is then timed on others, on which every setting of
the grid is timed too: a budget, with as many resident layers as fit beside it, and a draft length.
As in `bench/speed/grid.py`, the expected ms/token takes out the luck of how much of a draft stood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.drafts.overlap import prompts
from bench.harness.decode_loop import PrefilledText, Run
from bench.harness.options import (
    Context,
    Draft,
    Dtype,
    NewTokens,
    Output,
    Rates,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
    decimals,
    integers,
)
from bench.harness.record import benchmark, prepare, publish
from bench.harness.text import DEMO, text_tokens
from bench.speed.grid import Series, expected_yields, say, time_text
from decoding import Engine, Sampling, Settings
from decoding.runtime import Runtime
from decoding.speculation.draft_length import Fixed, RoundStats

# the memory is what this budget and so many layers take
SMALL_BUDGET, SMALL_LAYERS = 512, 4
INNER = 2  # inner draft length of the grid
# of prefill: with larger chunks this small a model's prefill needs more memory than decoding has to
# share out
CHUNK = 256
TUNED = "tuned"
Setting = tuple[int, int, int | str]  # budget, resident layers, draft length


@dataclass(frozen=True)
class Row:
    """All runs of one setting; of what the engine chose, budgets and layers of all its choices."""

    link_gbps: float
    budget: str
    resident_layers: str
    draft_length: str
    ms_per_token: float
    expected_ms_per_token: float


def memory_for(runtime: Runtime, prompt: int, new: int) -> int:
    """Return device memory, weights included, too small for large budgets and many layers both."""
    small = runtime.with_budget(SMALL_BUDGET)
    small = replace(small, settings=replace(small.settings, resident_layers=SMALL_LAYERS))
    return small.weight_bytes + small.plan(prompt, new).device_bytes + (1 << 20)


def tuned(engine: Engine, prompt: list[int], new: int, sampling: Sampling) -> tuple[Setting, Run]:
    """Run one text through the engine as it is; return what it chose, and the run."""
    for _ in engine.generate(prompt, new + 1, sampling):
        pass
    stats = engine.stats
    assert stats.choice is not None
    assert stats.choice.budget is not None
    assert stats.plan is not None
    run = Run(stats.decode_s, stats.new_tokens - 1, rounds=stats.rounds)
    return (stats.choice.budget, stats.plan.resident_layers, TUNED), run


def time_grid(
    runtime: Runtime,
    prompt: list[int],
    new: int,
    sampling: Sampling,
    grid: Mapping[int, list[int]],
    series: dict[Setting, Series],
) -> None:
    """Run one text with every setting of the grid: draft lengths by budget."""
    for budget, lengths in grid.items():
        text = PrefilledText(runtime.with_budget(budget), prompt, new)
        layers = text.session.plan.resident_layers
        methods: dict[Setting, partial[Run]] = {
            (budget, layers, length): partial(text.run, sampling, (Fixed(length), Fixed(INNER)))
            for length in lengths
        }
        time_text(methods, series, sampling.seed, f"text {sampling.seed + 1}")


def rows_of(rate: float, series: dict[Setting, Series]) -> list[Row]:
    """Return a row per setting of the grid and, last, that of what the engine chose."""
    rounds: dict[int, list[RoundStats]] = {}
    for (budget, _, _), each in series.items():
        rounds.setdefault(budget, []).extend(each.rounds)
    yields = {budget: expected_yields(every) for budget, every in rounds.items()}

    def row(length: str, parts: Mapping[Setting, Series]) -> Row:
        seconds = sum(each.seconds for each in parts.values())
        tokens = sum(run.tokens for each in parts.values() for run in each.runs)
        expected = sum(each.expected_tokens(yields[key[0]]) for key, each in parts.items())
        return Row(
            rate,
            " ".join(str(budget) for budget, _, _ in parts),
            " ".join(str(layers) for _, layers, _ in parts),
            length,
            1e3 * seconds / tokens,
            1e3 * seconds / expected,
        )

    fixed = {key: each for key, each in series.items() if key[2] != TUNED}
    chosen = {key: each for key, each in series.items() if key[2] == TUNED}
    return [*(row(str(key[2]), {key: each}) for key, each in fixed.items()), row(TUNED, chosen)]


def ratios(rows: list[Row]) -> dict[str, float]:
    """Return what was chosen against the best of the grid, on one link."""
    *grid, chosen = rows
    claims: dict[str, float] = {}
    for field, unit in (
        ("ms_per_token", "ms/token"),
        ("expected_ms_per_token", "ms/token, expected"),
    ):
        best = min(grid, key=lambda row: getattr(row, field))
        claim = (
            f"{chosen.link_gbps:g} GB/s, {unit}: tuned / best of {len(grid)} "
            f"(budget {best.budget}, draft {best.draft_length})"
        )
        claims[claim] = getattr(chosen, field) / getattr(best, field)
    return claims


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Context = 16_384,
    rates: Rates = "0.5,2",
    budgets: Annotated[str, typer.Option(help="Budgets of the grid.")] = "512,1024,2048,4096,8192",
    lengths: Annotated[str, typer.Option(help="Draft lengths of the grid.")] = "6,12,20,32,48,64",
    learn: Annotated[int, typer.Option(help="Texts the engine learns from.")] = 4,
    texts: Annotated[int, typer.Option(help="Texts that are timed.")] = 3,
    new_tokens: NewTokens = 96,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Output = Path("results/tune.json"),
) -> None:
    """Time a grid of budgets and draft lengths on each link, and what the engine chooses itself."""
    prepare(threads)
    base = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    stretches = prompts(text_tokens(base.tokenizer, text), context, learn + texts, new_tokens + 1)
    timed = stretches[:: (learn + texts) // texts][:texts]
    learnt = [stretch for stretch in stretches if stretch not in timed][:learn]
    grid = {budget: integers(lengths) for budget in integers(budgets)}
    law = Sampling(temperature, top_p=top_p)
    rows, claims, choices = list[Row](), dict[str, float](), dict[str, list[str]]()
    for rate in decimals(rates):
        settings = Settings(
            mode="hierarchical", dtype=dtype, link=f"emulated:{rate}", prefill_chunk=CHUNK
        )
        memory = memory_for(base.runtime.with_settings(settings), context, new_tokens + 1)
        runtime = base.runtime.with_settings(replace(settings, device_memory=memory))
        engine = Engine(runtime, base.tokenizer, frozenset())
        series: dict[Setting, Series] = {}
        reasons = choices.setdefault(f"{rate:g} GB/s", [])
        for number, prompt in enumerate([*learnt, *timed], -len(learnt)):
            seeded = replace(law, seed=number if number >= 0 else 100 + len(learnt) + number)
            (budget, layers, _), run = tuned(engine, prompt, new_tokens, seeded)
            assert engine.stats.choice is not None
            reasons.append(f"budget {budget}, {layers} layers: {engine.stats.choice.why}")
            say(f"{rate} GB/s, {'text' if number >= 0 else 'learning'}: {reasons[-1]}")
            if number >= 0:
                series.setdefault((budget, layers, TUNED), Series()).runs.append(run)
                time_grid(runtime, prompt, new_tokens, seeded, grid, series)
        runtime.link.close()
        reasons.append(f"device memory {memory / 1e6:.1f} MB")
        here = rows_of(rate, series)
        rows += here
        claims |= ratios(here)
    title = (
        f"{context:,} tokens, {dtype}, T {temperature}, top-p {top_p}, {texts} texts of "
        f"{new_tokens}"
    )
    publish(output, title, rows, claims, choices=choices)
