"""Acceptance of drafts from split layers: high bytes of all tokens, and low bits of some keys.

The physics: high bytes have 3 bits of mantissa. The error of a draft's attention comes mostly from
the keys of the tokens that attention falls on, so it helps to have the bits that these lack. Which
ones they are is known from the last verification, as for a retrieval cache.

`bench/drafts/overlap.py` measures acceptance exactly, in float32, and `split_view.py` emulates the
engine's split level: all layers are split, the boundary moves by its blocks, and each verification
selects. Every book has rows of its own, since books differ by a factor of five. A prompt is the
beginning of a book; with more `--prompts`, they are spread evenly over it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from bench.drafts.overlap import Chain, Trace, expected_tokens, rejected
from bench.drafts.split_view import SPLIT_DTYPE, EmulatedSplitView
from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import books, select_prompts
from decoding import Engine, Sampling, Settings
from decoding.config.defaults import SPLIT_BLOCK, SPLIT_RECENT
from decoding.models.runtime import Runtime
from offload.retrieval.shape import SplitSelectionSpec
from offload.tiered.cache import TieredCache

CHUNK = Settings().chunk_size
HIGH_BYTES = 0  # the budget of high bytes alone
Chains = dict[int, dict[int, list[Chain]]]  # chains by budget and draft tokens


class SplitTrace(Trace[int, EmulatedSplitView]):
    """A trace of drafts from split layers, by budget."""

    def __init__(
        self,
        runtime: Runtime,
        prompt: Sequence[int],
        new_tokens: int,
        budgets: Iterable[int],
        rows: int,
    ):
        """Make a cache for each budget; the rest as in `Trace`.

        The target's layers must be resident.
        """

        def make(target: TieredCache) -> dict[int, EmulatedSplitView]:
            target.shape = replace(target.shape, recent=SPLIT_RECENT, block=SPLIT_BLOCK)
            capacity = target.shape.capacity
            return {
                budget: EmulatedSplitView(
                    target, SplitSelectionSpec(budget, CHUNK, capacity) if budget else None
                )
                for budget in budgets
            }

        super().__init__(runtime, prompt, new_tokens, rows, make)


@dataclass(frozen=True)
class Study:
    """What the rows of all books have in common."""

    runtime: Runtime
    budgets: Sequence[int]
    draft_tokens: Sequence[int]
    new_tokens: int
    sampling: Sampling

    def chains(self, prompts: Iterable[Sequence[int]]) -> Chains:
        """Run all budgets along the same tokens, sampled after each prompt."""
        chains: Chains = {budget: {n: [] for n in self.draft_tokens} for budget in self.budgets}
        rows = max(self.draft_tokens)
        for seed, prompt in enumerate(prompts):
            sampling = replace(self.sampling, seed=seed)
            trace = SplitTrace(self.runtime, prompt, self.new_tokens, self.budgets, rows)
            tokens = trace.sample(self.new_tokens + 1, sampling)
            for n in self.draft_tokens:
                for budget, measured in trace.chains(tokens, n, sampling).items():
                    chains[budget][n] += measured
            del trace
            gc.collect()  # the target cache and its observers refer to each other
        return chains

    def rows(self, book: str, context: int, chains: Chains) -> list[Row]:
        """Return a row per budget, of one book."""
        return [
            {"book": book, "context": context}
            | self._memory(budget, context)
            | {
                "rejected": rejected(by_draft),  # share of draft tokens
                "expected_tokens": expected_tokens(by_draft),  # per verification of a whole draft
            }
            for budget, by_draft in chains.items()
        ]

    def _memory(self, budget: int, context: int) -> Row:
        """Return the columns that do not depend on the book.

        `memory` is that of selected keys relative to the KV of the context in 16 bits.
        """
        row: Row = {"draft_from": "high bytes", "split_budget": budget}
        if budget == HIGH_BYTES:
            return row | {"memory": 0.0}
        rows = max(self.draft_tokens)
        spec = SplitSelectionSpec(budget, CHUNK, context + self.new_tokens + rows + 1)
        layout = replace(self.runtime.requirements.layout, dtype=SPLIT_DTYPE)
        memory = spec.layer_bytes(layout) / layout.bytes(context, 1)
        return row | {"draft_from": f"and {budget:,} exact keys", "memory": memory}


def with_means(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of books, then their means by context and budget."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["context"], row["split_budget"]), []).append(row)
    means = [
        group[0]
        | {"book": f"mean of {len(group)}"}
        | {name: _mean([row[name] for row in group]) for name in ("rejected", "expected_tokens")}
        for group in groups.values()
    ]
    return [*rows, *means]


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their rejections relative to those of high bytes alone."""
    alone = {
        (row["book"], row["context"]): row["rejected"]
        for row in rows
        if row["split_budget"] == HIGH_BYTES
    }
    return [row | {"against_high_bytes": _ratios(row, alone)} for row in rows]


def _ratios(row: Row, alone: Mapping[tuple[str, int], Mapping[int, float]]) -> dict[int, float]:
    base = alone[row["book"], row["context"]]
    return {n: share / max(base[n], 1e-9) for n, share in row["rejected"].items()}


def _mean(by_draft: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {n: statistics.fmean(each[n] for each in by_draft) for n in by_draft[0]}


@benchmark(
    "High bytes of all tokens, and some exact keys: T {temperature}, top-p {top_p}, {new_tokens} "
    "tokens of the target after each prompt",
    ["split_budget"],
)
def main(
    target: opt.Target = opt.SMOLLM2,
    text: opt.Books = None,
    rope: opt.Rope = None,
    contexts: opt.Contexts = str(opt.NATIVE),
    budgets: Annotated[
        str, typer.Option(help="Budgets of exact keys, tokens per head.")
    ] = "2048,4096",
    draft_tokens: Annotated[str, typer.Option(help="Lengths of drafts.")] = "64,128,256",
    prompts: Annotated[int, typer.Option(help="Prompts per book and context.")] = 1,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens after each prompt; a multiple of every draft's.")
    ] = 512,
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/split.json"),
) -> Measurement:
    """Measure every book, with high bytes alone and with each budget."""
    lengths, sizes = opt.integers(draft_tokens), opt.integers(budgets)
    if any(n < 1 or new_tokens < n or new_tokens % n for n in lengths):
        raise typer.BadParameter(
            f"{new_tokens} is not a multiple of each of {draft_tokens}", param_hint="--new-tokens"
        )
    if min(sizes) < CHUNK:
        raise typer.BadParameter(
            f"{min(sizes)} is less than a chunk of {CHUNK} tokens", param_hint="--budgets"
        )
    settings = Settings(dtype="float32", mode="retrieval", rope=rope)
    engine = Engine.from_pretrained(target, settings=settings)
    resident = replace(settings, gpu_kv_layers=engine.runtime.target.config.full_layers)
    runtime = engine.runtime.with_settings(resident)
    sampling = Sampling(temperature, top_p=top_p)
    study = Study(runtime, (HIGH_BYTES, *sizes), lengths, new_tokens, sampling)
    tokens = {name: engine.tokenizer(words).input_ids for name, words in books(text).items()}
    rows: list[Row] = []
    for context, (book, its_tokens) in product(opt.integers(contexts), tokens.items()):
        say(f"{book}, {context:,} tokens")
        chains = study.chains(select_prompts(its_tokens, context, prompts, 0))
        rows += study.rows(book, context, chains)
        yield {"rows": with_ratios(with_means(rows))}
