"""Draft lengths: do the adaptive ones end near the best fixed pair? And how fast is each selection
policy at its own best length?

The physics: over a link a verification costs the same for any draft, so long drafts pay until
proposals stop standing; where compute is the cost they pay less. Which pair of lengths is best
depends on acceptance and on the link, so the engine finds it while it runs.

Every setting continues the same prompts, interleaved, in hierarchical mode. How much of a draft
stands is a matter of luck, which a hundred rounds do not even out. So beside the plain ms/token
there is an expected one: a setting's seconds over the tokens its drafts yield on average, given how
often a policy's proposals stand at each place of a draft, in all rounds of all its settings. (That
law does not depend on inner length or link.)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.drafts.overlap import OURS, STATIC, Variant, prompts
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
from decoding import Engine, Sampling, Settings
from decoding.planning.defaults import MAX_DRAFT
from decoding.session import Session, draft_lengths
from decoding.speculation.draft_length import Fixed, RecordingLength, RoundStats

Pair = tuple[int, int] | None  # draft length and inner length; None: adaptive


@dataclass
class Total:
    """All runs of one setting."""

    seconds: float = 0.0
    tokens: int = 0
    texts: list[list[RoundStats]] = field(default_factory=list)
    inner_rounds: list[RoundStats] = field(default_factory=list)
    by_text: list[float] = field(default_factory=list)  # ms/token

    def add(self, tokens: int, seconds: float, rounds: list[RoundStats]) -> None:
        self.texts.append(rounds)
        self.seconds += seconds
        self.tokens += tokens
        self.by_text.append(1e3 * seconds / tokens)

    @property
    def rounds(self) -> list[RoundStats]:
        return list(chain(*self.texts))

    def expected(self, yields: list[float]) -> float:
        """Tokens that its drafts yield on average."""
        return sum(yields[past.drafted] for past in self.rounds)

    @property
    def behind_whole_drafts(self) -> float:
        """The share of time in drafts behind one that stood whole: all that drafting ahead of the
        verdict could save.
        """
        follow = [(past, later) for rounds in self.texts for past, later in pairwise(rounds)]
        return (
            sum(later.draft_s for past, later in follow if past.accepted == past.drafted)
            / self.seconds
        )

    def row(self, rate: float, policy: str, pair: Pair, yields: list[float]) -> dict[str, Any]:
        return {
            "link GB/s": rate,
            "policy": policy,
            "lengths": f"{pair[0]}, {pair[1]}" if pair else "adaptive",
            "ms/token": 1e3 * self.seconds / self.tokens,
            "least": min(self.by_text),
            "most": max(self.by_text),
            "tokens per verification": self.tokens / len(self.rounds),
            "ms/token, expected": 1e3 * self.seconds / self.expected(yields),
            "mean draft": statistics.fmean(past.drafted for past in self.rounds),
            "drafted behind whole drafts": self.behind_whole_drafts,
            "mean inner draft": statistics.fmean(past.drafted for past in self.inner_rounds),
        }


def expected_yields(rounds: Sequence[RoundStats]) -> list[float]:
    """Tokens that a verified draft of 0, 1, ... tokens yields on average: 1 + sum_k prod_(i<=k) (1
    - h_i).

    h_i is how often a proposal at place i was rejected when all before it stood (the product-limit
    estimate of Kaplan and Meier 1958: a draft that ended, or stood whole, tells nothing of later
    places).
    """
    yields, standing = [1.0], 1.0
    for place in range(max(past.drafted for past in rounds)):
        tested = sum(place <= past.accepted and place < past.drafted for past in rounds)
        rejected = sum(past.accepted == place < past.drafted for past in rounds)
        standing *= 1 - rejected / tested if tested else 1
        yields.append(yields[-1] + standing)
    return yields


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Context = 16_384,
    rates: Rates = "0.5,2",
    lengths: Annotated[str, typer.Option(help="Draft lengths of the grid.")] = "8,16,32,48",
    inner: Annotated[str, typer.Option(help="Inner draft lengths of the grid.")] = "1,2",
    budget: Annotated[
        int, typer.Option(help="Retrieval budget of both policies, tokens a head.")
    ] = 768,
    published: Annotated[
        bool, typer.Option(help="Also the published policy, beside the engine's own.")
    ] = True,
    texts: Annotated[int, typer.Option(help="Prompts.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 128,
    dtype: Dtype = "float32",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Output = Path("results/lengths.json"),
) -> None:
    """Time a grid of fixed lengths and the adaptive ones, on each link, for the published policy
    and the engine's own.
    """
    prepare(threads)
    engine = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    tokens = text_tokens(engine.tokenizer, text)
    grid: list[Pair] = [
        (int(outer), int(below)) for outer, below in product(lengths.split(","), inner.split(","))
    ]
    progress = Console(stderr=True)
    totals: dict[tuple[float, Variant, Pair], Total] = {}
    for rate, variant in product(
        map(float, rates.split(",")), (OURS, STATIC) if published else (OURS,)
    ):
        # makes room; every run has lengths of its own
        longest = max(MAX_DRAFT, *(pair[0] for pair in grid if pair))
        settings = Settings(
            mode="hierarchical",
            dtype=dtype,
            budget=budget,
            link=f"emulated:{rate}",
            resident_layers=0,
        )
        settings = replace(settings, draft_length=longest)
        # for text after text, as in the engine
        adaptive = draft_lengths(replace(settings, draft_length=None))
        settings = replace(
            settings, policy=variant.policy, chunk_size=variant.chunk, summary_size=variant.summary
        )
        models = engine.runtime.with_settings(settings)
        for number, prompt in enumerate(prompts(tokens, context, texts, new_tokens)):
            session = Session(models, prompt, new_tokens + 1)
            first = int(session.prefill().argmax())
            start = session.snapshot()
            pairs = [None, *grid]
            # nobody is always the first
            for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                total = totals.setdefault((rate, variant, pair), Total())
                session.rewind(start)
                outer, below = (Fixed(pair[0]), Fixed(pair[1])) if pair else adaptive
                rounds: list[RoundStats] = []
                noted = (RecordingLength(outer, rounds), RecordingLength(below, total.inner_rounds))
                decoder, seconds = continued(
                    session, first, Sampling(temperature, top_p=top_p, seed=number), noted
                )
                total.add(decoder.stats.produced, seconds, rounds)
                name = "adaptive" if pair is None else f"{pair[0]}, {pair[1]}"
                progress.print(
                    f"{rate} GB/s, {variant.name}, text {number + 1}, {name}: "
                    f"{total.by_text[-1]:.1f} ms/token"
                )
        models.link.close()
    drafts: dict[Variant, list[RoundStats]] = {}
    for (_, variant, _), total in totals.items():
        drafts.setdefault(variant, []).extend(total.rounds)
    yields = {variant: expected_yields(every) for variant, every in drafts.items()}
    rows = [
        total.row(rate, variant.name, pair, yields[variant])
        for (rate, variant, pair), total in totals.items()
    ]
    show(
        f"{context:,} tokens, budget {budget}, {dtype}, T {temperature}, top-p {top_p}, {texts} "
        f"texts of {new_tokens}",
        rows,
    )
    ratios = _ratios(rows)
    for claim, value in ratios.items():
        print(f"{claim}: {value:.2f}")
    used = {
        "context": context,
        "budget": budget,
        "dtype": dtype,
        "temperature": temperature,
        "top_p": top_p,
        "texts": texts,
    }
    save(output, {"settings": {**used, "new_tokens": new_tokens}, "rows": rows, "ratios": ratios})


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Adaptive against the best fixed pair, and the policies at the best pair of each, on every
    link; plain and expected.
    """
    found = {}
    for rate, time_of in product(
        dict.fromkeys(row["link GB/s"] for row in rows), ("ms/token", "ms/token, expected")
    ):
        best = {}
        for policy in dict.fromkeys(row["policy"] for row in rows):
            here = [row for row in rows if (row["link GB/s"], row["policy"]) == (rate, policy)]
            fixed = min(
                (row for row in here if row["lengths"] != "adaptive"), key=lambda row: row[time_of]
            )
            adaptive = next(row for row in here if row["lengths"] == "adaptive")
            best[policy] = fixed[time_of]
            found[
                f"{policy}, {rate:g} GB/s, {time_of}: adaptive / best pair ({fixed['lengths']})"
            ] = adaptive[time_of] / fixed[time_of]
        if STATIC.name in best:
            name = (
                f"{OURS.name}, {rate:g} GB/s, {time_of}: times as fast as {STATIC.name}, each at "
                "its best pair"
            )
            found[name] = best[STATIC.name] / best[OURS.name]
    return found
