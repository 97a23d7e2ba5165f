"""What a retrieval cache's proposals are worth: acceptance by policy, budget, chunk, context,
temperature and tokens since the refresh.

The physics: over a link a verification costs the same whatever it verifies, so tokens per
verification is the speed. It follows from how often the proposals of the target on a retrieval
cache are what the target itself would have said. `bench/drafts/overlap.py` measures that exactly;
here it is tabled, beside tokens per verification counted in whole runs, and a needle in a long
text.

All policies get the same device memory. Parts are run one at a time with --parts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench.drafts.needle import needles
from bench.drafts.overlap import ALL, OURS, STATIC, Chain, Led, Variant, prompts
from bench.harness.options import Target, Temperature, Text, Threads, TopP
from bench.harness.plots import acceptance_plot
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, text_tokens
from decoding import Engine, Sampling, Settings

INTERVALS = (8, 16, 32, 64)
SEEDS = 2  # counted runs of one text
UNSHOWN = {
    "overlap by tokens since refresh",
    *(f"{name}{n}" for n in (8, 64) for name in ("rejected @", "x static @", "tokens n=")),
}
Chains = dict[Variant, dict[int, list[Chain]]]  # by variant and interval


class Study:
    """Everything the parts share: an engine, a text, how much of it, and how to draw from it."""

    def __init__(
        self, engine: Engine, tokens: Sequence[int], texts: int, new: int, sampling: Sampling
    ):
        self.engine, self.tokens, self.texts, self.new, self.sampling = (
            engine,
            tokens,
            texts,
            new,
            sampling,
        )
        self.progress = Console(stderr=True)

    def chains(
        self,
        context: int,
        variants: Sequence[Variant],
        intervals: Sequence[int] = INTERVALS,
        temperature: float | None = None,
    ) -> Chains:
        """Every variant along the same texts, drawn at these intervals between refreshes."""
        sampling = (
            self.sampling
            if temperature is None
            else replace(self.sampling, temperature=temperature)
        )
        found: Chains = {variant: {interval: [] for interval in intervals} for variant in variants}
        for number, prompt in enumerate(prompts(self.tokens, context, self.texts, self.new)):
            self.progress.print(
                f"{context} tokens, temperature {sampling.temperature}, text {number + 1} of "
                f"{self.texts}"
            )
            led = Led(self.engine.runtime, prompt, self.new, variants, max(intervals))
            text = led.text(self.new + 1, replace(sampling, seed=number))
            for interval in intervals:
                for variant, chains in led.along(text, interval, sampling).items():
                    found[variant][interval] += chains
        return found

    def policies(self, contexts: Sequence[int]) -> list[dict[str, Any]]:
        """Policies at equal memory, by context and tokens between refreshes."""
        return [
            row
            for context in contexts
            for row in _rows({"context": context}, self.chains(context, ALL))
        ]

    def budgets(self, context: int, budgets: Sequence[int]) -> list[dict[str, Any]]:
        variants = [replace(each, budget=budget) for budget in budgets for each in (STATIC, OURS)]
        found = self.chains(context, variants, (16, 32))
        return [
            row
            for budget in budgets
            for row in _rows(
                {"budget": budget},
                {each: chains for each, chains in found.items() if each.budget == budget},
            )
        ]

    def chunks(self, context: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Chunk sizes, with summaries and (as published) without, and sizes of summaries."""
        variants = [
            STATIC,
            *(replace(OURS, chunk=size) for size in sizes),
            *(replace(STATIC, chunk=size) for size in sizes),
        ]
        variants += [replace(OURS, summary=size) for size in (32, 64, 128, 256)]
        return _rows(
            {"context": context}, self.chains(context, list(dict.fromkeys(variants)), (16, 32))
        )

    def temperatures(self, context: int, temperatures: Sequence[float]) -> list[dict[str, Any]]:
        rows = []
        for temperature in temperatures:
            rows += _rows(
                {"temperature": temperature},
                self.chains(context, [STATIC, OURS], (16, 32), temperature=temperature),
            )
        return rows

    def counts(
        self, contexts: Sequence[int], temperatures: Sequence[float], draft: int
    ) -> list[dict[str, Any]]:
        """Tokens per verification by counting whole runs with a draft length of `draft`, by
        context, and by temperature at the first.
        """
        base, variants = self.sampling.temperature, (STATIC, OURS)
        made: dict[tuple[int, float, Variant], list[tuple[int, int]]] = {}
        for context in contexts:
            degrees = list(dict.fromkeys([base, *(temperatures if context == contexts[0] else [])]))
            for number, prompt in enumerate(prompts(self.tokens, context, self.texts, self.new)):
                self.progress.print(
                    f"counting behind {context} tokens, text {number + 1} of {self.texts}"
                )
                led = Led(self.engine.runtime, prompt, self.new, variants, draft + 2)
                for temperature, variant, seed in product(degrees, variants, range(SEEDS)):
                    sampling = replace(
                        self.sampling, temperature=temperature, seed=SEEDS * number + seed
                    )
                    made.setdefault((context, temperature, variant), []).append(
                        led.counted(variant, self.new, draft, sampling)
                    )
        rows = []
        for (context, temperature, variant), runs in made.items():
            tokens, passes = (sum(each) for each in zip(*runs, strict=True))
            row = {
                "context": context,
                "temperature": temperature,
                "policy": variant.name,
                "tokens": tokens,
            }
            rows.append(
                {**row, "verifications": passes, "tokens per verification": tokens / passes}
            )
        return rows


def _rows(labels: dict[str, Any], found: Chains) -> list[dict[str, Any]]:
    """A row per variant: rejection at each interval, against the static policy's, and the yield of
    chains of that length.
    """

    def rejected(variant: Variant, interval: int) -> float:
        return 1 - statistics.fmean(
            float(chain.overlap.mean()) for chain in found[variant][interval]
        )

    rows = []
    for variant, by_interval in found.items():
        row: dict[str, Any] = {**labels, "policy": variant.name}
        static = next(
            (
                each
                for each in found
                if (each.policy, each.chunk, each.budget) == ("static", 8, variant.budget)
            ),
            variant,
        )
        for interval in by_interval:
            row[f"rejected @{interval}"] = rejected(variant, interval)
            row[f"x static @{interval}"] = rejected(variant, interval) / max(
                rejected(static, interval), 1e-9
            )
        for interval, chains in by_interval.items():
            row[f"tokens n={interval}"] = statistics.fmean(chain.tokens for chain in chains)
        row["overlap by tokens since refresh"] = (
            torch.stack([chain.overlap for chain in by_interval[max(by_interval)]]).mean(0).tolist()
        )
        rows.append(row)
    return rows


@benchmark
def main(
    target: Target = DEMO / "target",
    text: Text = None,
    parts: Annotated[
        str, typer.Option(help="Of policies,budgets,chunks,temperatures,counts,needle.")
    ] = "policies,budgets,chunks,temperatures,counts,needle",
    context: Annotated[
        int, typer.Option(help="Prompt tokens, where a part looks at one context.")
    ] = 16_384,
    contexts: Annotated[
        str, typer.Option(help="Prompt tokens of the part policies.")
    ] = "16384,4096,32768",
    counted: Annotated[
        str, typer.Option(help="Prompt tokens of the part counts; temperatures at the first.")
    ] = "16384,32768",
    budgets: Annotated[str, typer.Option(help="Budgets, tokens a head.")] = "512,768,1536,3072",
    chunks: Annotated[str, typer.Option(help="Chunk sizes.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.4,0.8,1.2",
    texts: Annotated[int, typer.Option(help="Texts per context.")] = 4,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens drawn from the target behind each; a multiple of 64.")
    ] = 256,
    draft_length: Annotated[int, typer.Option(help="Draft length of the counted runs.")] = 32,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Annotated[Path, typer.Option(help="JSON document; the plot goes beside it.")] = Path(
        "results/acceptance.json"
    ),
) -> None:
    """Measure the parts asked for, in float32, print tables, and write one JSON document and a
    plot.
    """
    prepare(threads)
    if new_tokens < 64 or new_tokens % 64:
        raise typer.BadParameter(f"{new_tokens} is not a multiple of 64", param_hint="--new-tokens")
    engine = Engine.from_pretrained(target, settings=Settings(dtype="float32", mode="retrieval"))
    tokens = text_tokens(engine.tokenizer, text)
    sampling = Sampling(temperature, top_p=top_p)
    study = Study(engine, tokens, texts, new_tokens, sampling)
    several, degrees = (
        [int(each) for each in contexts.split(",")],
        [float(each) for each in temperatures.split(",")],
    )
    tasks = {
        "policies": lambda: study.policies(several),
        "budgets": lambda: study.budgets(context, [int(each) for each in budgets.split(",")]),
        "chunks": lambda: study.chunks(context, [int(each) for each in chunks.split(",")]),
        "temperatures": lambda: study.temperatures(context, degrees),
        "counts": lambda: study.counts(
            [int(each) for each in counted.split(",")], degrees, draft_length
        ),
        "needle": lambda: needles(engine.runtime, engine.tokenizer, tokens, context, ALL),
    }
    if unknown := set(parts.split(",")) - set(tasks):
        raise typer.BadParameter(
            f"{', '.join(unknown)}: use {', '.join(tasks)}", param_hint="--parts"
        )
    results = {}
    for part in parts.split(","):
        results[part] = tasks[part]()
        show(
            f"{part}: budget 768 unless said, float32, T {temperature}, top-p {top_p}, {texts} "
            f"texts of {new_tokens} tokens",
            [
                {name: value for name, value in row.items() if name not in UNSHOWN}
                for row in results[part]
            ],
        )
    settings = {
        "texts": texts,
        "new_tokens": new_tokens,
        "draft_length": draft_length,
    }
    save(output, {"settings": {**settings, "temperature": temperature, "top_p": top_p}, **results})
    if "policies" in results:
        acceptance_plot(results["policies"], output.with_suffix(".png"))
        print(f"drawn to {output.with_suffix('.png')}")
