"""Draft lengths: the adaptive ones against a grid of fixed pairs, for two selection policies.

The physics: over a link a verification costs the same for any draft, so long drafts pay until
proposals stop standing; where compute is the cost they pay less. Which pair of lengths is best
depends on acceptance and on the link, so the engine finds it while it runs.

Every setting continues the same prompts in hierarchical mode (`bench/speed/grid.py`). How often a
policy's proposals stand at each place of a draft is taken from all rounds of all its settings: that
law does not depend on inner length or link.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated

import typer

from bench.drafts.overlap import OURS, STATIC, Variant, prompts
from bench.harness.decode_loop import PrefilledText
from bench.harness.options import (
    Budget,
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
from bench.speed.grid import Series, expected_yields, time_text
from decoding import Engine, Sampling, Settings
from decoding.planning.needs import MAX_DRAFT
from decoding.session import draft_lengths
from decoding.speculation.draft_length import Fixed, RoundStats

ADAPTIVE = "adaptive"
Setting = tuple[float, str, str]  # link in GB/s, name of the policy, lengths


@dataclass(frozen=True)
class Row:
    """All runs of one setting, over one link."""

    link_gbps: float
    policy: str
    lengths: str  # of a draft and of an inner draft, or that they adapt
    ms_per_token: float
    min_ms_per_token: float  # of one text
    max_ms_per_token: float
    tokens_per_verification: float
    expected_ms_per_token: float
    mean_draft: float
    drafted_behind_whole_drafts: float
    mean_inner_draft: float

    @classmethod
    def of(cls, setting: Setting, series: Series, yields: Sequence[float]) -> Row:
        inner_rounds = [each for run in series.runs for each in run.inner_rounds]
        return cls(
            *setting,
            series.ms_per_token,
            min(series.times),
            max(series.times),
            sum(run.tokens for run in series.runs) / len(series.rounds),
            series.expected_ms_per_token(yields),
            statistics.fmean(each.drafted for each in series.rounds),
            behind_whole_drafts(series),
            statistics.fmean(each.drafted for each in inner_rounds),
        )


def behind_whole_drafts(series: Series) -> float:
    """Return the share of time in drafts behind one that stood whole.

    That is all that drafting ahead of the verdict could save.
    """
    seconds = sum(
        later.draft_s
        for run in series.runs
        for each, later in pairwise(run.rounds)
        if each.accepted == each.drafted
    )
    return seconds / series.seconds


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Context = 16_384,
    rates: Rates = "0.5,2",
    lengths: Annotated[str, typer.Option(help="Draft lengths of the grid.")] = "8,16,32,48",
    inner: Annotated[str, typer.Option(help="Inner draft lengths of the grid.")] = "1,2",
    budget: Budget = 768,
    published: Annotated[
        bool, typer.Option(help="Also the published policy, beside the engine's own.")
    ] = True,
    texts: Annotated[int, typer.Option(help="Prompts.")] = 4,
    new_tokens: NewTokens = 128,
    dtype: Dtype = "float32",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Output = Path("results/lengths.json"),
) -> None:
    """Time fixed and adaptive lengths on each link, for the engine's policy and the published."""
    prepare(threads)
    engine = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    stretches = prompts(text_tokens(engine.tokenizer, text), context, texts, new_tokens)
    pairs = list(product(integers(lengths), integers(inner)))
    variants = (OURS, STATIC) if published else (OURS,)
    # room for the longest; every run has lengths of its own
    longest = max(MAX_DRAFT, *(outer for outer, _ in pairs))
    base = Settings(mode="hierarchical", dtype=dtype, budget=budget, resident_layers=0)
    series: dict[Setting, Series] = {}
    for rate, variant in product(decimals(rates), variants):
        settings = policy_settings(base, variant, f"emulated:{rate}")
        runtime = engine.runtime.with_settings(replace(settings, draft_length=longest))
        # those that adapt go on from text to text, as in the engine
        choices = {ADAPTIVE: draft_lengths(settings)}
        choices |= {f"{outer}, {below}": (Fixed(outer), Fixed(below)) for outer, below in pairs}
        for number, prompt in enumerate(stretches):
            prefilled = PrefilledText(runtime, prompt, new_tokens)
            law = Sampling(temperature, top_p=top_p, seed=number)
            methods = {
                (rate, variant.name, name): partial(prefilled.run, law, choice)
                for name, choice in choices.items()
            }
            time_text(methods, series, number, f"text {number + 1}")
        runtime.link.close()
    rows = rows_of(series)
    title = (
        f"{context:,} tokens, budget {budget}, {dtype}, T {temperature}, top-p {top_p}, {texts} "
        f"texts of {new_tokens}"
    )
    publish(output, title, rows, ratios(rows))


def policy_settings(base: Settings, variant: Variant, link: str) -> Settings:
    """Return the settings under which the engine selects as this variant does."""
    return replace(
        base,
        link=link,
        policy=variant.policy,
        chunk_size=variant.chunk,
        summary_size=variant.summary,
    )


def rows_of(series: dict[Setting, Series]) -> list[Row]:
    """Return a row per setting; what a policy's drafts yield is taken from all its settings."""
    rounds: dict[str, list[RoundStats]] = {}
    for (_, policy, _), each in series.items():
        rounds.setdefault(policy, []).extend(each.rounds)
    yields = {policy: expected_yields(every) for policy, every in rounds.items()}
    return [Row.of(setting, each, yields[setting[1]]) for setting, each in series.items()]


def ratios(rows: list[Row]) -> dict[str, float]:
    """Return how adaptive lengths compare with the best fixed pair, and how the policies compare.

    Both for every link, by plain and by expected ms/token.
    """
    claims: dict[str, float] = {}
    for rate in dict.fromkeys(row.link_gbps for row in rows):
        for field, unit in (
            ("ms_per_token", "ms/token"),
            ("expected_ms_per_token", "ms/token, expected"),
        ):
            best: dict[str, float] = {}
            for policy in dict.fromkeys(row.policy for row in rows):
                mine = {
                    row.lengths: getattr(row, field)
                    for row in rows
                    if (row.link_gbps, row.policy) == (rate, policy)
                }
                adaptive = mine.pop(ADAPTIVE)
                pair = min(mine, key=mine.__getitem__)
                best[policy] = mine[pair]
                claim = f"{policy}, {rate:g} GB/s, {unit}: adaptive / best pair ({pair})"
                claims[claim] = adaptive / mine[pair]
            if STATIC.name in best:
                claim = (
                    f"{OURS.name}, {rate:g} GB/s, {unit}: times as fast as {STATIC.name}, each at "
                    "its best pair"
                )
                claims[claim] = best[STATIC.name] / best[OURS.name]
    return claims
