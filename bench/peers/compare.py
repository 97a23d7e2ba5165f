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
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark, prepare
from bench.harness.process import Died, call_in_process
from bench.harness.tables import cell, say
from bench.harness.text import prompt_tokens
from bench.peers.base import Job, Result, Unavailable
from bench.peers.registry import PEERS
from decoding import Sampling
from decoding.models.loading import load_tokenizer
from decoding.speculation.sequence import common_prefix
from offload.errors import one_line
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

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


@dataclass
class Runs:
    """What came of one peer at one context, and the most memory its processes held."""

    outcomes: list[Outcome] = field(default_factory=list)
    peak_gb: float = 0.0

    @property
    def results(self) -> list[Result]:
        return [each for each in self.outcomes if isinstance(each, Result)]

    def row(self, context: int, peer: str, wanted: list[int] | None) -> Row:
        """Return the row of these runs: medians of times, counts of the last that was finished.

        `wanted` None: tokens are drawn.
        """
        reasons = [each for each in self.outcomes if isinstance(each, str)]
        row = {"context": context, "peer": peer, "ms_per_token": None, "prefill_s": None}
        if not self.results:
            return row | {"note": reasons[-1]}
        times = [each.ms_per_token for each in self.results]
        last = self.results[-1]
        moved = last.link_bytes_per_token
        return row | {
            "prefill_s": statistics.median(each.first_s for each in self.results),
            "ms_per_token": statistics.median(times),
            "min_ms_per_token": min(times),
            "max_ms_per_token": max(times),
            "tokens_per_verification": last.tokens_per_verification,
            "acceptance": last.acceptance.get("target"),
            "inner_acceptance": last.acceptance.get("retrieval"),
            "link_mb_per_token": moved / 1e6 if moved else None,
            "peak_gb": self.peak_gb,
            # as our own plain greedy one
            "same_text": None if wanted is None else compare_texts(last.tokens, wanted),
            "note": reasons[0] if reasons else last.note,
        }


def compare_texts(tokens: list[int], wanted: list[int]) -> str:
    """Return whether a text is the one wanted, or how many tokens of it are."""
    return "yes" if tokens == wanted else f"to token {common_prefix(tokens, wanted)}"


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
    for context in dict.fromkeys(row["context"] for row in rows):
        times = {
            row["peer"]: row["ms_per_token"]
            for row in rows
            if row["context"] == context and row["ms_per_token"]
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


@benchmark(
    "{new_tokens} new tokens, {dtype}, T {temperature}, top-p {top_p}, {threads} threads, "
    "link {link}"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    text: opt.Text = None,
    context: opt.Contexts = f"{opt.NATIVE}",
    new_tokens: opt.NewTokens = 128,
    peers: Annotated[
        str, typer.Option(help="Parts of the names of peers to run; all by default.")
    ] = "",
    link: Annotated[
        str, typer.Option(help="Of our offloaded modes: emulated:GB/s on a CPU, auto on a GPU.")
    ] = "emulated:0.5",
    retrieval_budget: Annotated[
        int | None, typer.Option(help="Retrieval budget; by default the engine's own.")
    ] = None,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 1,
    limit_s: Annotated[float, typer.Option(help="Seconds a run may take.")] = 900,
    output: opt.Output = Path("results/compare.json"),
) -> Measurement:
    """Run every peer at every context, and compare."""
    names = [name for name in PEERS if any(part.strip() in name for part in peers.split(","))]
    if not names:
        known = ", ".join(PEERS)
        raise typer.BadParameter(f"no peer is named like that: {known}", param_hint="--peers")
    model = resolve(target, TensorParallelGroup())
    small = None if draft is None else resolve(draft, TensorParallelGroup())
    tokenizer = load_tokenizer(model)
    prompts = [prompt_tokens(tokenizer, tokens, text) for tokens in opt.integers(context)]
    law, scratch = Sampling(temperature, top_p=top_p), output.parent / "converted"
    jobs = [
        Job(model, small, rope, prompt, new_tokens, law, dtype, retrieval_budget, link, scratch)
        for prompt in prompts
    ]
    for name in names:
        with suppress(Exception):  # what fails here fails again where its row says why
            PEERS[name].convert(jobs[0])
    runs: dict[tuple[int, str], Runs] = {}
    greedy: dict[int, list[int]] = {}  # our own plain text, by context
    for job, repeat, name in product(jobs, range(repeats), names):
        tokens, again = len(job.prompt), replace(job, sampling=replace(law, seed=repeat))
        outcome, peak_gb = run(name, again, threads, limit_s)
        found = runs.setdefault((tokens, name), Runs())
        found.outcomes.append(outcome)
        found.peak_gb = max(found.peak_gb, peak_gb)
        if name == PLAIN and isinstance(outcome, Result) and law.temperature == 0:
            greedy.setdefault(tokens, outcome.tokens)
        rows = {key: each.row(*key, greedy.get(key[0])) for key, each in runs.items()}
        row = rows[tokens, name]
        speed = f"{cell(row['ms_per_token'])} ms/token, prefill {cell(row['prefill_s'])} s"
        say(f"{tokens} tokens, {name}: {row['note'] or speed}")
        yield {"rows": list(rows.values()), "ratios": ratios(list(rows.values()))}
