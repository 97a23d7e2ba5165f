"""What proposals are worth, by policy, budget, chunk, context, temperature and refresh.

The physics: over a link a verification costs the same whatever it verifies, so tokens per
verification is the speed. It follows from how often the proposals of the target on a retrieval
cache are what the target itself would have said. `bench/drafts/overlap.py` measures that exactly;
here it is tabled. `python -m bench grid --vary policy=...` counts whole runs.

All policies get the same device memory right after a choice. A small model that goes on by itself
soon repeats itself, and what it repeats is easy to guess: `--along book` lets all policies follow
the book's own words in place of the target's. Parts are run one at a time with --parts.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.drafts.overlap import ALL, OURS, STATIC, WHOLE, Chain, PolicyTrace, Variant
from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompts, text_tokens
from decoding import Engine, Sampling, Settings

INTERVALS = (8, 16, 32, 64)  # tokens between refreshes
SHORT_INTERVALS = (16, 64)
PARTS = "policies,budgets,chunks,temperatures"
ALONG = ("target", "book")
UNSHOWN = [f"{name}.{n}" for n in (8, 32) for name in ("rejected", "against_static")]
Chains = dict[Variant, dict[int, list[Chain]]]  # by variant and interval
Rows = Iterator[list[Row]]  # after each text


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
            same = {"texts": texts, "context": context, "temperature": sampling.temperature}
            yield [same | self._row(variant, chains) for variant in chains]

    def _row(self, variant: Variant, chains: Chains) -> Row:
        """Return what is said of a variant; by tokens between refreshes, where that matters."""
        own = chains[variant]
        rejected = _rejected(own)
        static = _rejected(chains.get(replace(STATIC, budget=variant.budget), own))
        longest = torch.stack([chain.overlap for chain in own[max(own)]])
        return {
            "retrieval_budget": variant.budget,  # tokens in 16 bits that take as much memory
            "tokens": variant.tokens(
                self.engine.runtime.requirements.layout
            ),  # that it holds, a head
            "policy": variant.name,
            "rejected": rejected,  # the share of proposals
            "against_static": {n: rejected[n] / max(static[n], 1e-9) for n in rejected},
            # of a verification of a draft as long as the interval; a book's words tell nothing
            "expected_tokens": {
                n: statistics.fmean(chain.tokens for chain in each)
                for n, each in own.items()
                if self.along == "target"
            },
            # by tokens since the refresh, for the longest interval
            "overlap_by_age": longest.mean(0).tolist(),
        }

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
            law, runtime = replace(sampling, seed=number), self.engine.runtime
            trace = PolicyTrace(runtime, both[:context], self.new, variants, max(intervals))
            text = torch.tensor(both[context:])
            if self.along == "target":
                text = trace.text(len(text), law)
            for interval in intervals:
                for variant, each in trace.chains(text, interval, law).items():
                    chains[variant][interval] += each
            del trace
            gc.collect()  # caches and the one that they follow know each other
            yield chains


def _joined(studies: Iterable[Rows]) -> Rows:
    """Yield the rows of one study after the other, each with those before it."""
    done: list[Row] = []
    for study in studies:
        rows: list[Row] = []
        for rows in study:
            yield [*done, *rows]
        done += rows


def _rejected(by_interval: Mapping[int, Sequence[Chain]]) -> dict[int, float]:
    """Return the share of proposals that is rejected, by tokens between refreshes."""
    return {
        n: 1 - statistics.fmean(float(chain.overlap.mean()) for chain in chains)
        for n, chains in by_interval.items()
    }


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
    budgets: Annotated[str, typer.Option(help="Budgets, tokens a head.")] = "768,2048,4096",
    chunks: Annotated[str, typer.Option(help="Chunk sizes.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.4,0.8,1.2",
    texts: Annotated[int, typer.Option(help="Texts per context.")] = 4,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens drawn from the target behind each; a multiple of 64.")
    ] = 256,
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/acceptance.json"),
) -> Measurement:
    """Measure the parts asked for, in float32."""
    if along not in ALONG:
        raise typer.BadParameter(f"{along}: use {' or '.join(ALONG)}", param_hint="--along")
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
    }
    if unknown := set(parts.split(",")) - set(tasks):
        raise typer.BadParameter(f"{', '.join(unknown)}: use {PARTS}", param_hint="--parts")
    measured: dict[str, list[Row]] = {}
    for part in parts.split(","):
        for rows in tasks[part]:
            measured[part] = rows
            yield measured
