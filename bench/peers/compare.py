"""TierForce and its peers side by side: on this machine, with this model, on this text.

Every run is a process of its own: models loaded afresh, its memory watched from outside, and
whatever happens to it is a row with the reason. Prefill and decoding are timed apart, repeats go
round all peers, and medians count. What is finished is on disk after every run; Ctrl-C ends with
the rows that there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.harness.options import (
    NATIVE,
    SMOLLM2,
    Contexts,
    Draft,
    Dtype,
    NewTokens,
    Output,
    Repeats,
    Rope,
    Target,
    Temperature,
    Text,
    Threads,
    TopP,
    integers,
)
from bench.harness.process import Died, call_in_process
from bench.harness.record import benchmark, prepare, publish, save
from bench.harness.tables import cell, say
from bench.harness.text import prompt_tokens
from bench.peers.base import Job, Result, Unavailable
from bench.peers.registry import PEERS
from decoding import Sampling
from decoding.models.loading import load_tokenizer
from offload.errors import one_line
from parallel.model.loading import resolve
from parallel.ranks.process_group import Group

Outcome = Result | str  # or why there is none
PLAIN, OFFLOADED = "ours: plain", " offloaded"
OURS = "ours: "
COMPARED = (  # one, and what it is to be faster than
    ("ours: retrieval", PLAIN),
    ("ours: hierarchical", PLAIN),
    ("ours: retrieval offloaded", "ours: plain offloaded"),
    ("ours: hierarchical offloaded", "ours: plain offloaded"),
    (PLAIN, "transformers: dynamic cache"),
    (PLAIN, "transformers: static cache"),
)


@dataclass(frozen=True)
class Row:
    """One peer at one context: medians of times, counts of the last run that was finished."""

    context: int
    peer: str
    prefill_s: float | None = None
    ms_per_token: float | None = None
    min_ms_per_token: float | None = None
    max_ms_per_token: float | None = None
    tokens_per_verification: float | None = None
    acceptance: float | None = None
    inner_acceptance: float | None = None
    link_mb_per_token: float | None = None
    peak_gb: float | None = None
    same_text: str | None = None  # as our own plain greedy one
    note: str | None = None


@dataclass
class Runs:
    """What came of one peer at one context, and the most memory its processes held."""

    outcomes: list[Outcome] = field(default_factory=list)
    peak_gb: float = 0.0

    @property
    def results(self) -> list[Result]:
        return [each for each in self.outcomes if isinstance(each, Result)]

    def row(self, context: int, peer: str, wanted: list[int] | None) -> Row:
        """Return the row of these runs; `wanted` None where tokens are drawn."""
        reasons = [each for each in self.outcomes if isinstance(each, str)]
        if not self.results:
            return Row(context, peer, note=reasons[-1])
        times = [1e3 * each.decode_s / max(1, len(each.tokens) - 1) for each in self.results]
        last = self.results[-1]
        moved = last.link_bytes_per_token
        return Row(
            context,
            peer,
            prefill_s=statistics.median(each.first_s for each in self.results),
            ms_per_token=statistics.median(times),
            min_ms_per_token=min(times),
            max_ms_per_token=max(times),
            tokens_per_verification=last.tokens_per_verification,
            acceptance=last.acceptance.get("target"),
            inner_acceptance=last.acceptance.get("retrieval"),
            link_mb_per_token=moved / 1e6 if moved else None,
            peak_gb=self.peak_gb,
            same_text=None if wanted is None else compare_texts(last.tokens, wanted),
            note=reasons[0] if reasons else last.note,
        )


def compare_texts(tokens: list[int], wanted: list[int]) -> str:
    """Return whether a text is the one wanted, or how many tokens of it are."""
    if tokens == wanted:
        return "yes"
    pairs = enumerate(zip(tokens, wanted, strict=False))
    shorter = min(len(tokens), len(wanted))
    return f"to token {next((at for at, (one, other) in pairs if one != other), shorter)}"


def attempt(name: str, job: Job, threads: int) -> Outcome:
    """Load one peer and run it, in this process."""
    prepare(threads)
    try:
        peer = PEERS[name](job)
        return replace(peer.run(), note=peer.note)
    except Unavailable as reason:
        return f"skipped: {reason}"
    except Exception as error:  # a peer may fail in any way; that is what the row then says
        return f"failed: {type(error).__name__}: {one_line(error)}"


def run(name: str, job: Job, threads: int, limit_s: float) -> tuple[Outcome, float]:
    """Run one peer in a process of its own; return what came of it and its peak memory in GB."""
    outcome, peak_gb = call_in_process(attempt, name, job, threads, limit_s=limit_s)
    return (f"failed: {outcome}" if isinstance(outcome, Died) else outcome), peak_gb


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return how many times as fast one is as another, at every context that has both.

    And how the fastest of ours without a link compares with the fastest of the others.
    """
    claims: dict[str, float] = {}
    for context in dict.fromkeys(row.context for row in rows):
        times = {
            row.peer: row.ms_per_token
            for row in rows
            if row.context == context and row.ms_per_token
        }
        own = [peer for peer in times if peer.startswith(OURS) and not peer.endswith(OFFLOADED)]
        others = [peer for peer in times if not peer.startswith(OURS)]
        pairs = [pair for pair in COMPARED if times.keys() >= set(pair)]
        for fast, slow in pairs:
            claim = f"{context:,} tokens: {fast}, times as fast as {slow}"
            claims[claim] = times[slow] / times[fast]
        if own and others:
            fast, slow = (min(each, key=times.__getitem__) for each in (own, others))
            claim = f"{context:,} tokens: {fast}, times as fast as the fastest other, {slow}"
            claims[claim] = times[slow] / times[fast]
    return claims


class Comparison:
    """All runs so far, kept on disk after each."""

    def __init__(self, output: Path, threads: int, limit_s: float):
        self.output, self.threads, self.limit_s = output, threads, limit_s
        self.runs: dict[tuple[int, str], Runs] = {}
        self.greedy: dict[int, list[int]] = {}  # our own plain text, by context

    def add(self, name: str, job: Job) -> None:
        """Run one peer once more."""
        key = len(job.prompt), name
        outcome, peak_gb = run(name, job, self.threads, self.limit_s)
        runs = self.runs.setdefault(key, Runs())
        runs.outcomes.append(outcome)
        runs.peak_gb = max(runs.peak_gb, peak_gb)
        if name == PLAIN and isinstance(outcome, Result) and job.sampling.temperature == 0:
            self.greedy.setdefault(key[0], outcome.tokens)
        save(self.output, self.document(), quiet=True)
        row = next(each for each in self.rows() if (each.context, each.peer) == key)
        speed = f"{cell(row.ms_per_token)} ms/token, prefill {cell(row.prefill_s)} s"
        say(f"{key[0]} tokens, {name}: {row.note or speed}")

    def rows(self) -> list[Row]:
        """Return a row per peer and context."""
        return [
            runs.row(context, peer, self.greedy.get(context))
            for (context, peer), runs in self.runs.items()
        ]

    def document(self) -> dict[str, Any]:
        """Return rows and ratios."""
        rows = self.rows()
        return {"rows": rows, "ratios": ratios(rows)}


@benchmark
def main(
    target: Target = SMOLLM2,
    draft: Draft = None,
    rope: Rope = None,
    text: Text = None,
    context: Contexts = str(NATIVE),
    new_tokens: NewTokens = 128,
    peers: Annotated[
        str, typer.Option(help="Parts of the names of peers to run; all by default.")
    ] = "",
    link: Annotated[
        str, typer.Option(help="Of our offloaded modes: emulated:GB/s on a CPU, auto on a GPU.")
    ] = "emulated:0.5",
    budget: Annotated[
        int | None, typer.Option(help="Retrieval budget; by default the engine's own.")
    ] = None,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    threads: Threads = 0,
    repeats: Repeats = 1,
    limit_s: Annotated[float, typer.Option(help="Seconds a run may take.")] = 900,
    output: Output = Path("results/compare.json"),
) -> None:
    """Run every peer at every context, and compare."""
    prepare(threads)
    names = [name for name in PEERS if any(part.strip() in name for part in peers.split(","))]
    if not names:
        known = ", ".join(PEERS)
        raise typer.BadParameter(f"no peer is named like that: {known}", param_hint="--peers")
    model = resolve(target, Group())
    small = None if draft is None else resolve(draft, Group())
    tokenizer = load_tokenizer(model)
    prompts = [prompt_tokens(tokenizer, tokens, text) for tokens in integers(context)]
    law, scratch = Sampling(temperature, top_p=top_p), output.parent / "converted"
    jobs = [
        Job(model, small, rope, prompt, new_tokens, law, dtype, budget, link, scratch)
        for prompt in prompts
    ]
    for name in names:
        with suppress(Exception):  # what fails here fails again where its row says why
            PEERS[name].convert(jobs[0])
    comparison = Comparison(output, threads, limit_s)
    try:
        for job in jobs:
            for repeat in range(repeats):
                for name in names:
                    comparison.add(name, replace(job, sampling=replace(law, seed=repeat)))
    except KeyboardInterrupt:
        say("interrupted: what is finished is kept")
    if comparison.runs:
        title = (
            f"{new_tokens} new tokens, {dtype}, T {temperature}, top-p {top_p}, "
            f"{torch.get_num_threads()} threads, link {link}"
        )
        publish(output, title, **comparison.document())
