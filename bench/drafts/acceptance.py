"""Acceptance of drafts by policy, budget, chunk size, context, temperature and selection interval.

The physics: over a link a verification costs the same for any draft, so tokens per verification
determine the speed. They follow from the acceptance rate of the target's drafts on a retrieval
cache, which `bench/drafts/overlap.py` measures exactly and this module tabulates.
`python -m bench grid --vary policy=...` measures whole runs.

All policies have the same device memory right after a selection. A small model that continues its
own output soon repeats itself, which is easy to predict: with `--along book`, all policies follow
the book's tokens instead of the target's. --parts runs single parts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.drafts.overlap import (
    ALL,
    OURS,
    STATIC,
    WHOLE,
    Chain,
    PolicyTrace,
    Variant,
    expected_tokens,
    rejected,
)
from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import select_prompts, text_tokens
from decoding import Engine, Sampling, Settings

INTERVALS = (8, 16, 32, 64)  # tokens between selections
SHORT_INTERVALS = (16, 64)
PARTS = "policies,budgets,chunks,temperatures"
ALONG = ("target", "book")
UNSHOWN = [f"{name}.{n}" for n in (8, 32) for name in ("rejected", "against_static")]
Chains = dict[Variant, dict[int, list[Chain]]]  # chains by variant and interval
Rows = Iterator[list[Row]]  # all rows so far, after each prompt


@dataclass(frozen=True)
class Study:
    """The inputs that all parts share: engine, text, prompts, new tokens and sampling."""

    engine: Engine
    tokens: Sequence[int]
    prompts: int
    new_tokens: int
    sampling: Sampling
    along: str  # one of ALONG: source of the tokens that the policies follow

    def rows(
        self,
        context: int,
        variants: Iterable[Variant],
        intervals: Sequence[int] = SHORT_INTERVALS,
        temperature: float | None = None,
    ) -> Rows:
        """Yield a row per variant, along the same tokens: over one prompt, then over two, ..."""
        sampling = self.sampling
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        all_chains = self.chains(context, list(dict.fromkeys(variants)), intervals, sampling)
        for count, chains in enumerate(all_chains, start=1):
            shared = {"texts": count, "context": context, "temperature": sampling.temperature}
            yield [shared | self._row(variant, chains) for variant in chains]

    def _row(self, variant: Variant, chains: Chains) -> Row:
        """Return the columns of a variant, by selection interval if they depend on it."""
        variant_chains = chains[variant]
        own = rejected(variant_chains)
        static = rejected(chains.get(replace(STATIC, budget=variant.budget), variant_chains))
        longest = torch.stack([chain.overlap for chain in variant_chains[max(variant_chains)]])
        return {
            "retrieval_budget": variant.budget,  # equivalent number of tokens in 16 bits
            # selected tokens per head
            "tokens": variant.tokens(self.engine.runtime.requirements.layout),
            "policy": variant.name,
            "rejected": own,  # share of draft tokens
            "against_static": {n: own[n] / max(static[n], 1e-9) for n in own},
            # per verification of a draft as long as the interval; unknown along a book
            "expected_tokens": expected_tokens(variant_chains) if self.along == "target" else {},
            # overlap by tokens since the selection, for the longest interval
            "overlap_by_age": longest.mean(0).tolist(),
        }

    def chains(
        self,
        context: int,
        variants: Sequence[Variant],
        intervals: Sequence[int],
        sampling: Sampling,
    ) -> Iterator[Chains]:
        """Run every variant along the same tokens, with these selection intervals.

        Yields all chains so far, after each prompt.
        """
        chains: Chains = {variant: {n: [] for n in intervals} for variant in variants}
        total, runtime = context + self.new_tokens + 1, self.engine.runtime
        for seed, tokens in enumerate(select_prompts(self.tokens, total, self.prompts, 0)):
            say(f"{context} tokens, T {sampling.temperature}, prompt {seed + 1} of {self.prompts}")
            seeded = replace(sampling, seed=seed)
            prompt, continuation = tokens[:context], torch.tensor(tokens[context:])
            trace = PolicyTrace(runtime, prompt, self.new_tokens, variants, max(intervals))
            if self.along == "target":
                continuation = trace.sample(len(continuation), seeded)
            for interval in intervals:
                for variant, measured in trace.chains(continuation, interval, seeded).items():
                    chains[variant][interval] += measured
            del trace
            gc.collect()  # the target cache and its observers refer to each other
            yield chains


def _concatenate(studies: Iterable[Rows]) -> Rows:
    """Yield the rows of studies one after another, each with all previous rows."""
    done: list[Row] = []
    for study in studies:
        rows: list[Row] = []
        for rows in study:
            yield [*done, *rows]
        done += rows


@benchmark(
    "budget 768 by default, float32, T {temperature}, top-p {top_p}, {prompts} prompts, "
    "{new_tokens} tokens of the {along} after each",
    UNSHOWN,
)
def main(
    target: opt.Target = opt.SMOLLM2,
    text: opt.Text = None,
    parts: Annotated[str, typer.Option(help=f"Parts, of {PARTS}.")] = PARTS,
    context: Annotated[
        int, typer.Option(help="Prompt tokens of parts with one context.")
    ] = opt.NATIVE,
    along: Annotated[
        str, typer.Option(help="Source of the tokens to follow: target or book.")
    ] = "target",
    rope: opt.Rope = None,
    contexts: Annotated[str, typer.Option(help="Prompt tokens, of the part policies.")] = "7424",
    budgets: Annotated[str, typer.Option(help="Budgets, tokens per head.")] = "768,2048,4096",
    chunks: Annotated[str, typer.Option(help="Chunk sizes.")] = "1,2,4,8,16",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.4,0.8,1.2",
    prompts: Annotated[int, typer.Option(help="Prompts per context.")] = 4,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens after each prompt; a multiple of 64.")
    ] = 256,
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/acceptance.json"),
) -> Measurement:
    """Measure the selected parts, in float32."""
    if along not in ALONG:
        raise typer.BadParameter(f"{along}: use {' or '.join(ALONG)}", param_hint="--along")
    if new_tokens < 64 or new_tokens % 64:
        raise typer.BadParameter(f"{new_tokens} is not a multiple of 64", param_hint="--new-tokens")
    settings = Settings(dtype="float32", mode="retrieval", rope=rope)
    engine = Engine.from_pretrained(target, settings=settings)
    tokens = text_tokens(engine.tokenizer, text)
    study = Study(engine, tokens, prompts, new_tokens, Sampling(temperature, top_p=top_p), along)
    by_budget = [
        replace(variant, budget=size)
        for size in opt.integers(budgets)
        for variant in (STATIC, WHOLE, OURS)
    ]
    by_chunk = [replace(OURS, chunk=size) for size in opt.integers(chunks)]
    tasks: dict[str, Rows] = {
        "policies": _concatenate(
            study.rows(length, ALL, INTERVALS) for length in opt.integers(contexts)
        ),
        "budgets": study.rows(context, by_budget),
        "chunks": study.rows(context, [STATIC, *by_chunk]),
        "temperatures": _concatenate(
            study.rows(context, (STATIC, OURS), temperature=value)
            for value in opt.decimals(temperatures)
        ),
    }
    if unknown := set(parts.split(",")) - set(tasks):
        raise typer.BadParameter(f"{', '.join(unknown)}: use {PARTS}", param_hint="--parts")
    measured: dict[str, list[Row]] = {}
    for part in parts.split(","):
        for rows in tasks[part]:
            measured[part] = rows
            yield measured
