"""Does the engine find settings as good as the best of a grid, where budget and resident layers
share too little memory?

The physics: over a link every layer that is resident saves its share of a verification; every token
of retrieval budget makes verifications rarer, and drafting dearer. Which is worth more depends on
the link, and on how often proposals stand.

The engine reads some texts first, to learn, and is then timed on others, on which every setting of
the grid is timed too: a budget, with as many resident layers as fit beside it, and a draft length.
As in `bench lengths`, the expected ms/token takes out the luck of how much of a draft stood.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.drafts.overlap import prompts
from bench.harness.decode_loop import continued
from bench.harness.options import (
    Context,
    Draft,
    Dtype,
    Output,
    Rates,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
)
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, text_tokens
from bench.speed.lengths import Total, expected_yields
from decoding import Engine, Sampling, Settings
from decoding.runtime import Runtime
from decoding.session import Session
from decoding.speculation.draft_length import Fixed, RecordingLength, RoundStats

SMALLEST, MOST_LAYERS = 512, 4  # the memory is what this budget and so many layers take
INNER = 2
# of prefill: with larger ones this small a model's prefill needs more memory than decoding has to
# share out
CHUNK = 256
Found = dict[int, tuple[int, Total]]  # by budget: resident layers, and all texts
Grid = dict[tuple[int, int], tuple[int, Total]]  # by budget and draft length


def memory_for(models: Runtime, prompt: int, new: int) -> int:
    """Device memory, weights included, in which budgets and layers have to be weighed against each
    other.
    """
    small = models.with_budget(SMALLEST)
    smallest = replace(small, settings=replace(small.settings, resident_layers=MOST_LAYERS))
    return smallest.weight_bytes + smallest.plan(prompt, new).device_bytes + (1 << 20)


def tuned(engine: Engine, prompt: list[int], new: int, sampling: Sampling, found: Found) -> str:
    """One text through the engine as it is; why it chose what it did."""
    for _ in engine.generate(prompt, new, sampling):
        pass
    stats = engine.stats
    assert stats.choice is not None
    assert stats.choice.budget is not None
    assert stats.plan is not None
    _, total = found.setdefault(stats.choice.budget, (stats.plan.resident_layers, Total()))
    total.add(stats.new_tokens - 1, stats.decode_s, stats.rounds)
    return f"budget {stats.choice.budget}, {stats.plan.resident_layers} layers: {stats.choice.why}"


def fixed(models: Runtime, prompt: list[int], new: int, sampling: Sampling, grid: Grid) -> None:
    """The same text with every setting of the grid."""
    for budget in dict.fromkeys(budget for budget, _ in grid):
        session = Session(models.with_budget(budget), prompt, new)
        first = int(session.prefill().argmax())
        start = session.snapshot()
        for length in (length for each, length in grid if each == budget):
            session.rewind(start)
            rounds: list[RoundStats] = []
            decoder, seconds = continued(
                session, first, sampling, (RecordingLength(Fixed(length), rounds), Fixed(INNER))
            )
            grid[budget, length] = (session.plan.resident_layers, grid[budget, length][1])
            grid[budget, length][1].add(decoder.stats.produced, seconds, rounds)


def table(rate: float, found: Found, grid: Grid) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The grid's rows and, last, that of what was chosen; and the latter against the best of the
    others.
    """
    rounds: dict[int, list[RoundStats]] = {}
    for budget, total in chain(
        ((b, total) for (b, _), (_, total) in grid.items()),
        ((b, each) for b, (_, each) in found.items()),
    ):
        rounds.setdefault(budget, []).extend(total.rounds)
    yields = {budget: expected_yields(each) for budget, each in rounds.items()}

    def row(
        budget: str, layers: str, length: str, parts: list[tuple[int, Total]]
    ) -> dict[str, Any]:
        seconds = sum(total.seconds for _, total in parts)
        labels = {"link GB/s": rate, "budget": budget, "resident": layers, "draft length": length}
        times = {"ms/token": 1e3 * seconds / sum(total.tokens for _, total in parts)}
        return (
            labels
            | times
            | {
                "ms/token, expected": (
                    1e3 * seconds / sum(total.expected(yields[each]) for each, total in parts)
                )
            }
        )

    rows = [
        row(str(b), str(layers), str(length), [(b, total)])
        for (b, length), (layers, total) in grid.items()
    ]
    layers = " ".join(str(layers) for layers, _ in found.values())
    chosen = row(
        " ".join(map(str, found)),
        layers,
        "tuned",
        [(budget, total) for budget, (_, total) in found.items()],
    )
    ratios = {}
    for time_of in ("ms/token", "ms/token, expected"):
        best = min(rows, key=lambda row: row[time_of])
        name = (
            f"{rate:g} GB/s, {time_of}: tuned / best of {len(rows)} (budget {best['budget']}, draft"
            f" {best['draft length']})"
        )
        ratios[name] = chosen[time_of] / best[time_of]
    return [*rows, chosen], ratios


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
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 96,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Output = Path("results/tune.json"),
) -> None:
    """Time a grid of budgets and draft lengths, and what the engine chooses by itself, on each
    link.
    """
    prepare(threads)
    base = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    stretches = prompts(text_tokens(base.tokenizer, text), context, learn + texts, new_tokens + 1)
    timed = stretches[:: (learn + texts) // texts][:texts]
    learnt = [stretch for stretch in stretches if stretch not in timed][:learn]
    settings_of = list(product(map(int, budgets.split(",")), map(int, lengths.split(","))))
    progress, rows, ratios, said = (
        Console(stderr=True),
        list[dict[str, Any]](),
        dict[str, float](),
        dict[str, list[str]](),
    )
    for rate in map(float, rates.split(",")):
        settings = Settings(
            mode="hierarchical", dtype=dtype, link=f"emulated:{rate}", prefill_chunk=CHUNK
        )
        memory = memory_for(base.runtime.with_settings(settings), context, new_tokens + 1)
        models = base.runtime.with_settings(replace(settings, device_memory=memory))
        engine, found, reasons = Engine(models, base.tokenizer, frozenset()), Found(), list[str]()
        law = Sampling(temperature, top_p=top_p)
        for number, prompt in enumerate(learnt):
            reasons.append(
                tuned(engine, prompt, new_tokens + 1, replace(law, seed=100 + number), {})
            )
            progress.print(f"{rate} GB/s, learning: {reasons[-1]}")
        grid: Grid = {setting: (0, Total()) for setting in settings_of}
        for number, prompt in enumerate(timed):
            reasons.append(tuned(engine, prompt, new_tokens + 1, replace(law, seed=number), found))
            progress.print(f"{rate} GB/s, text {number + 1}: {reasons[-1]}")
            fixed(models, prompt, new_tokens + 1, replace(law, seed=number), grid)
        models.link.close()
        here, against = table(rate, found, grid)
        rows += here
        ratios |= against
        said[f"{rate:g} GB/s"] = [*reasons, f"device memory {memory / 1e6:.1f} MB"]
    show(
        f"{context:,} tokens, {dtype}, T {temperature}, top-p {top_p}, {texts} texts of "
        f"{new_tokens}",
        rows,
    )
    for claim, value in ratios.items():
        print(f"{claim}: {value:.2f}")
    used = {
        "context": context,
        "dtype": dtype,
        "temperature": temperature,
        "top_p": top_p,
        "learn": learn,
        "texts": texts,
    }
    save(
        output,
        {
            "settings": {**used, "new_tokens": new_tokens},
            "rows": rows,
            "ratios": ratios,
            "choices": said,
        },
    )
