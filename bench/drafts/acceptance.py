"""What proposals are worth, by policy, budget, chunk, context, temperature and refresh.

The physics: over a link a verification costs the same whatever it verifies, so tokens per
verification is the speed. It follows from how often the proposals of the target on a retrieval
cache are what the target itself would have said. `bench/drafts/overlap.py` measures that exactly;
here it is tabled, beside tokens per verification counted in whole runs.

All policies get the same device memory right after a choice. A small model that goes on by itself
soon repeats itself, and what it repeats is easy to guess: `--along book` lets all policies follow
the book's own words in place of the target's. Parts are run one at a time with --parts.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from torch import Tensor

from bench.drafts.overlap import ALL, OURS, STATIC, WHOLE, Chain, PolicyTrace, Variant
from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompts, text_tokens
from decoding import Engine, Sampling, Settings

INTERVALS = (8, 16, 32, 64)  # tokens between refreshes
SHORT_INTERVALS = (16, 64)
MAX_ROWS = 256  # of a window, a block of the boundary and a pass together, at most
MEMORY_SHARE = 0.5  # of what is free, for the caches of variants that are led at once
SEEDS = 2  # counted runs of one text
PARTS = "policies,budgets,chunks,temperatures,counts"
ALONG = ("target", "book")
UNSHOWN = [f"{name}.{n}" for n in (8, 32) for name in ("rejected", "against_static")]
Chains = dict[Variant, dict[int, list[Chain]]]  # by variant and interval


Rows = Iterator[list[Row]]  # behind each text


@dataclass(frozen=True)
class Study:
    """What the parts share: an engine, a text, how much of it, and how to draw from it."""

    engine: Engine
    tokens: Sequence[int]
    texts: int
    new: int
    sampling: Sampling
    along: str  # one of ALONG: whose words the policies follow

    def rows(
        self,
        context: int,
        variants: Iterable[Variant],
        intervals: Sequence[int] = SHORT_INTERVALS,
        temperature: float | None = None,
    ) -> Rows:
        """Yield a row per variant, all led along the same texts: of one text, then of two, ..."""
        sampling = self.sampling
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        every = self.chains(context, list(dict.fromkeys(variants)), intervals, sampling)
        for texts, chains in enumerate(every, start=1):
            yield self._summed_up(texts, context, chains, sampling)

    def _summed_up(self, texts: int, context: int, chains: Chains, sampling: Sampling) -> list[Row]:
        rejected = {
            variant: {interval: _rejected(each) for interval, each in by_interval.items()}
            for variant, by_interval in chains.items()
        }
        rows = []
        for variant, by_interval in chains.items():
            static = rejected.get(replace(STATIC, budget=variant.budget), rejected[variant])
            longest = torch.stack([chain.overlap for chain in by_interval[max(by_interval)]])
            expected = {
                n: statistics.fmean(chain.tokens for chain in each)
                for n, each in by_interval.items()
                if self.along == "target"
            }
            row = {
                "texts": texts,
                "context": context,
                "budget": variant.budget,  # tokens in 16 bits that take as much memory
                "tokens": variant.tokens(self.engine.runtime.needs.layout),  # that it holds, a head
                "temperature": sampling.temperature,
                "policy": variant.name,
                # by tokens between refreshes: the share of proposals, and that over the static
                # policy's
                "rejected": rejected[variant],
                "against_static": {
                    n: share / max(static[n], 1e-9) for n, share in rejected[variant].items()
                },
                # of a verification of a draft as long as the interval; a book's words tell nothing
                "expected_tokens": expected,
                # by tokens since the refresh, for the longest interval
                "overlap_by_age": longest.mean(0).tolist(),
            }
            rows.append(row)
        return rows

    def chains(
        self,
        context: int,
        variants: Sequence[Variant],
        intervals: Sequence[int],
        sampling: Sampling,
    ) -> Iterator[Chains]:
        """Lead every variant along the same texts, with these intervals between refreshes.

        Yields what there is behind each text.
        """
        chains: Chains = {variant: {each: [] for each in intervals} for variant in variants}
        more = self.new + 1
        for number, both in enumerate(prompts(self.tokens, context + more, self.texts, 0)):
            say(f"{context} tokens, T {sampling.temperature}, text {number + 1} of {self.texts}")
            law = replace(sampling, seed=number)
            self._lead(both[:context], torch.tensor(both[context:]), chains, law)
            yield chains

    def _lead(self, prompt: list[int], text: Tensor, chains: Chains, sampling: Sampling) -> None:
        """Lead all variants along one text, and add to `chains`; their caches go with the call.

        Where not all of them fit the memory at once, they follow in parts.
        """
        intervals = list(next(iter(chains.values())))
        first, *others = self._parts(list(chains))
        trace = PolicyTrace(self.engine.runtime, prompt, self.new, first, max(intervals))
        if self.along == "target":
            text = trace.text(len(text), sampling)
        for part in (first, *others):
            if part is not first:
                trace.turn_to(part)
            say(f"{len(part)} of {len(chains)} variants follow")
            for interval in intervals:
                for variant, each in trace.chains(text, interval, sampling).items():
                    chains[variant][interval] += each
        del trace
        gc.collect()  # caches and the one that they follow know each other

    def _parts(self, variants: Sequence[Variant]) -> list[list[Variant]]:
        """Return the variants in parts whose caches take a share of the free memory at most."""
        layout = self.engine.runtime.needs.layout
        room = MEMORY_SHARE * psutil.virtual_memory().available
        parts: list[list[Variant]] = [[]]
        taken = 0
        for variant in variants:
            # its own, what comes behind them, and a snapshot of all
            tokens = 2 * (variant.tokens(layout) + self.new + MAX_ROWS)
            if parts[-1] and taken + layout.bytes(tokens) > room:
                parts.append([])
                taken = 0
            parts[-1].append(variant)
            taken += layout.bytes(tokens)
        return parts

    def counts(self, contexts: Sequence[int], temperatures: Sequence[float], draft: int) -> Rows:
        """Yield the tokens per verification of whole runs with drafts of `draft` tokens.

        By context, and by temperature at the first of them; of one text, then of two, ...
        """
        base, variants = self.sampling.temperature, (STATIC, OURS)
        counted: dict[tuple[int, float, Variant], list[tuple[int, int]]] = {}
        for context in contexts:
            degrees = [base, *(temperatures if context == contexts[0] else ())]
            for number, prompt in enumerate(prompts(self.tokens, context, self.texts, self.new)):
                say(f"counting behind {context} tokens, text {number + 1} of {self.texts}")
                trace = PolicyTrace(self.engine.runtime, prompt, self.new, variants, draft + 2)
                for degree, variant, seed in product(
                    dict.fromkeys(degrees), variants, range(SEEDS)
                ):
                    law = replace(self.sampling, temperature=degree, seed=SEEDS * number + seed)
                    run = trace.count(variant, self.new, draft, law)
                    counted.setdefault((context, degree, variant), []).append(run)
                del trace  # before there is memory for the next one
                yield [_counted(*key, runs) for key, runs in counted.items()]


def _counted(
    context: int, temperature: float, variant: Variant, runs: Sequence[tuple[int, int]]
) -> Row:
    """Return the row of runs, of which each has its tokens and its verifications."""
    tokens, passes = (sum(each) for each in zip(*runs, strict=True))
    return {
        "context": context,
        "temperature": temperature,
        "policy": variant.name,
        "tokens": tokens,
        "verifications": passes,
        "tokens_per_verification": tokens / passes,
    }


def _joined(studies: Iterable[Rows]) -> Rows:
    """Yield the rows of one study after the other, each with those before it."""
    done: list[Row] = []
    for study in studies:
        rows: list[Row] = []
        for rows in study:
            yield [*done, *rows]
        done += rows


def _rejected(chains: Sequence[Chain]) -> float:
    return 1 - statistics.fmean(float(chain.overlap.mean()) for chain in chains)


@benchmark(
    "budget 768 unless said, float32, T {temperature}, top-p {top_p}, {texts} texts of "
    "{new_tokens} tokens, of the {along}",
    UNSHOWN,
)
def main(
    target: opt.Target = opt.SMOLLM2,
    text: opt.Text = None,
    parts: Annotated[str, typer.Option(help=f"Of {PARTS}.")] = PARTS,
    context: Annotated[
        int, typer.Option(help="Prompt tokens, where a part looks at one context.")
    ] = opt.NATIVE,
    along: Annotated[
        str, typer.Option(help="Whose words are followed: those of the target, or of the book.")
    ] = "target",
    rope: opt.Rope = None,
    contexts: Annotated[str, typer.Option(help="Prompt tokens of the part policies.")] = "7424",
    counted: Annotated[
        str, typer.Option(help="Prompt tokens of the part counts; temperatures at the first.")
    ] = "7424",
    budgets: Annotated[str, typer.Option(help="Budgets, tokens a head.")] = "768,2048,4096",
    chunks: Annotated[str, typer.Option(help="Chunk sizes.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.4,0.8,1.2",
    texts: Annotated[int, typer.Option(help="Texts per context.")] = 4,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens drawn from the target behind each; a multiple of 64.")
    ] = 256,
    draft_length: Annotated[int, typer.Option(help="Draft length of the counted runs.")] = 32,
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/acceptance.json"),
) -> Measurement:
    """Measure the parts asked for, in float32."""
    if along not in ALONG:
        raise typer.BadParameter(f"{along}: use {' or '.join(ALONG)}", param_hint="--along")
    if along == "book" and "counts" in parts.split(","):
        raise typer.BadParameter("counts goes along the target alone", param_hint="--parts")
    if new_tokens < 64 or new_tokens % 64:
        raise typer.BadParameter(f"{new_tokens} is not a multiple of 64", param_hint="--new-tokens")
    settings = Settings(dtype="float32", mode="retrieval", rope=rope)
    engine = Engine.from_pretrained(target, settings=settings)
    tokens = text_tokens(engine.tokenizer, text)
    study = Study(engine, tokens, texts, new_tokens, Sampling(temperature, top_p=top_p), along)
    degrees, both = opt.decimals(temperatures), (STATIC, OURS)
    every = (STATIC, WHOLE, OURS)
    by_budget = [replace(each, budget=size) for size in opt.integers(budgets) for each in every]
    by_chunk = [replace(OURS, chunk=size) for size in opt.integers(chunks)]
    tasks: dict[str, Rows] = {
        "policies": _joined(study.rows(each, ALL, INTERVALS) for each in opt.integers(contexts)),
        "budgets": study.rows(context, by_budget),
        "chunks": study.rows(context, [STATIC, *by_chunk]),
        "temperatures": _joined(study.rows(context, both, temperature=each) for each in degrees),
        "counts": study.counts(opt.integers(counted), degrees, draft_length),
    }
    if unknown := set(parts.split(",")) - set(tasks):
        raise typer.BadParameter(f"{', '.join(unknown)}: use {PARTS}", param_hint="--parts")
    measured: dict[str, list[Row]] = {}
    for part in parts.split(","):
        for rows in tasks[part]:
            measured[part] = rows
            yield measured
